"""Pushes blobs and manifests to a registry, as the OCI distribution specification has it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode, urljoin, urlsplit

from octavo.bundle.errors import BundleError
from octavo.fetch.errors import FetchError, FetchReason, Passing, of_status
from octavo.fetch.oci import basic_credentials
from octavo_common.remote.http import json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo.bundle.blobs import BlobContent, Descriptor
    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Body, Http, HttpResponse

_Result = TypeVar("_Result")

_PLACE = re.compile(r"(?P<host>[A-Za-z0-9.-]+(?::\d{1,5})?)(?P<path>(?:/[a-z0-9][a-z0-9._-]*)*)")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_HINT = "set OCI_USERNAME and OCI_PASSWORD, or run docker login"
_ATTEMPTS = 4
PAUSE_S = 1.0  # after the first of them, and doubled after each


class RegistryClient:
    """`place`: HOST[:PORT][/PATH]. Plain HTTP is for this machine's own only, as when fetching."""

    def __init__(self, place: str, http: Http, credentials: Credentials) -> None:
        match = _PLACE.fullmatch(place.rstrip("/"))
        if match is None:
            raise BundleError(f"{place[:200]} is not a registry; it must be HOST:PORT or HOST/PATH")
        self.place = match[0]
        self._path = match["path"].removeprefix("/")
        is_local = re.match(r"(localhost|127\.0\.0\.1)(:|$)", match["host"]) is not None
        self._base = f"{'http' if is_local else 'https'}://{match['host']}/v2/"
        self._http = http
        self._basic = basic_credentials(match["host"], credentials)
        self._authorization: dict[str, str] = {}  # by repository
        self._where: dict[str, str] = {}  # digest → a repository that has it

    def has_blob(self, repository: str, digest: str) -> bool:
        return self._has(repository, f"blobs/{digest}", "*/*")

    def _has(self, repository: str, path: str, accept: str) -> bool:
        with self._open("HEAD", repository, path, {"accept": accept}) as answer:
            if answer.status in (200, 404):
                return answer.status == 200
            raise self._refusal(answer, repository)

    def push_blob(self, repository: str, blob: Descriptor, content: BlobContent) -> bool:
        """False where the registry has it already."""
        is_new = self._patiently(lambda: self._push_blob(repository, blob, content))
        self._where[blob.digest] = repository
        return is_new

    def push_manifest(self, repository: str, tag: str, manifest: Descriptor, body: bytes) -> None:
        """By its tag. Raises BundleError where the registry stored something else."""

        def put() -> None:
            headers = {"content-type": manifest.media_type, "content-length": str(len(body))}
            with self._open("PUT", repository, f"manifests/{tag}", headers, body) as answer:
                if answer.status != 201:
                    raise self._refusal(answer, repository)
                stored = answer.headers.get("docker-content-digest", manifest.digest)
            if stored != manifest.digest:
                raise BundleError(
                    f"{self.place} stored {stored} for {manifest.digest}: it alters manifests, so "
                    "that digests cannot be pinned; use another registry"
                )

        self._patiently(put)
        # Registries deny manifests of kinds that a client does not name.
        if not self._has(repository, f"manifests/{manifest.digest}", manifest.media_type):
            raise BundleError(f"{self.place} does not have {manifest.digest} after it was pushed")

    def _push_blob(self, repository: str, blob: Descriptor, content: BlobContent) -> bool:
        if self.has_blob(repository, blob.digest):
            return False
        query = {}
        if source := self._where.get(blob.digest):
            query = {"mount": blob.digest, "from": self._full(source)}
        path = f"blobs/uploads/{'?' if query else ''}{urlencode(query)}"
        with self._open("POST", repository, path, {"content-length": "0"}) as answer:
            if answer.status == 201:  # it was in another repository
                return False
            location = answer.headers.get("location", "")
            if answer.status != 202 or not location:
                raise self._refusal(answer, repository)
        url = urljoin(self._url(repository, path), location)
        url += f"{'&' if urlsplit(url).query else '?'}{urlencode({'digest': blob.digest})}"
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(content.size),
        }
        with self._open("PUT", repository, url, headers, content) as answer:
            if answer.status != 201:
                raise self._refusal(answer, repository)
        return True

    def _open(
        self,
        method: str,
        repository: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> HttpResponse:
        """Signed in where the registry wants that."""
        url = path if "://" in path else self._url(repository, path)
        is_ours = urlsplit(url).netloc == urlsplit(self._base).netloc
        sent = {"accept": "*/*", **(headers or {})}

        def send() -> HttpResponse:
            known = self._authorization.get(repository, "")
            granted = {"authorization": known} if known and is_ours else {}
            return self._http.open(
                url, headers=sent, sign=lambda *_: granted, method=method, body=body
            )

        answer = send()
        if answer.status != 401 or not is_ours:
            return answer
        challenge = answer.headers.get("www-authenticate", "")
        answer.close()
        self._authorization[repository] = self._sign_in(challenge, repository)
        return send()

    def _sign_in(self, challenge: str, repository: str) -> str:
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._basic:
            return f"Basic {self._basic}"
        parameters = dict(_PARAMETER.findall(rest))
        realm = parameters.get("realm", "")
        if scheme.lower() != "bearer" or not realm:
            raise FetchError(FetchReason.UNAUTHORIZED, f"{self.place} wants credentials; {_HINT}")
        if urlsplit(realm).scheme != "https" and self._base.startswith("https"):
            raise BundleError(f"{self.place} sends its tokens unencrypted; refused")
        query = {"scope": f"repository:{self._full(repository)}:pull,push"}
        if service := parameters.get("service"):
            query["service"] = service
        basic = {"authorization": f"Basic {self._basic}"} if self._basic else {}
        content, _ = self._http.get(
            f"{realm}?{urlencode(query)}", sign=lambda *_: basic, hint=_HINT, what=self.place
        )
        granted = json_object(content, realm)
        token = granted.get("token") or granted.get("access_token")
        if not isinstance(token, str):
            raise FetchError(FetchReason.UNAUTHORIZED, f"{self.place} grants no token; {_HINT}")
        return f"Bearer {token}"

    def _patiently(self, step: Callable[[], _Result]) -> _Result:
        for attempt in range(_ATTEMPTS - 1):
            try:
                return step()
            except Passing as error:
                time.sleep(error.after_s or PAUSE_S * 2**attempt)
        return step()

    def _url(self, repository: str, path: str) -> str:
        return f"{self._base}{self._full(repository)}/{path}"

    def _full(self, repository: str) -> str:
        return f"{self._path}/{repository}" if self._path else repository

    def _refusal(self, answer: HttpResponse, repository: str) -> FetchError:
        what = f"pushing {repository} to {self.place}"
        if answer.status in (401, 403, 429) or answer.status >= 500:
            return of_status(answer.status, what, hint=_HINT, after_s=answer.retry_after_s)
        said = " ".join(answer.text().decode(errors="replace").split())[:300]
        return FetchError(
            FetchReason.FAILED,
            f"{what}: the registry answers {answer.status}{f': {said}' if said else ''}",
        )
