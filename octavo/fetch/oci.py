"""Models as artifacts in an OCI registry: each layer a file, named by its annotation."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from octavo.fetch.errors import FetchError, FetchReason, of_status
from octavo.fetch.source import RemoteFile, SourceListing, choose
from octavo_common.remote.http import json_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Http, HttpResponse

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_ACCEPT = ", ".join((*_MANIFESTS, *_INDEXES))
_TITLE = "org.opencontainers.image.title"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_LOCATION = re.compile(
    rf"(?P<host>[A-Za-z0-9.-]+(?::\d{{1,5}})?)/(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HINT = "set OCI_USERNAME and OCI_PASSWORD, or mount a Docker configuration with that registry"
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_HUB_KEY = "https://index.docker.io/v1/"


class Oci:
    """`location`: HOST/NAME:TAG, or HOST/NAME@sha256:DIGEST."""

    def __init__(self, location: str, http: Http, credentials: Credentials) -> None:
        match = _LOCATION.fullmatch(location)
        if match is None:
            raise FetchError(
                FetchReason.FAILED,
                f"oci://{location[:200]} is not of the form oci://HOST/NAME:TAG or "
                "oci://HOST/NAME@sha256:DIGEST",
            )
        host, self._name = match["host"], match["name"]
        self._reference = match["digest"] or match["tag"] or "latest"
        self._host = "registry-1.docker.io" if host == "docker.io" else host
        is_local = re.match(r"(localhost|127\.0\.0\.1)(:|$)", host) is not None
        self._base = f"{'http' if is_local else 'https'}://{self._host}/v2/{self._name}"
        self._http = http
        self._basic = basic_credentials(host, credentials)
        self._authorization = ""
        self._where = f"oci://{host}/{self._name}"

    def find(self) -> SourceListing:
        manifest, digest = self._manifest(self._reference)
        if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
            manifest, _ = self._manifest(_first(manifest, self._where))
        layers: dict[str, dict[str, Any]] = {}
        for layer in manifest.get("layers") or []:
            title = (layer.get("annotations") or {}).get(_TITLE) if isinstance(layer, dict) else ""
            if isinstance(title, str) and title:
                layers[title] = layer
        if not layers:
            raise FetchError(
                FetchReason.FAILED,
                f"{self._where} is no artifact of files: its layers have no {_TITLE}; push the "
                "files themselves, as `oras push` does (archives are never unpacked)",
            )
        names = choose(layers, self._where)
        return SourceListing(
            tuple(self._file(name, layers[name]) for name in names), digest, digest
        )

    def _manifest(self, reference: str) -> tuple[dict[str, Any], str]:
        url = f"{self._base}/manifests/{reference}"
        answer = self._open(url)
        with answer:
            if answer.status in (404, 410) and _DIGEST.fullmatch(reference):
                raise FetchError(
                    FetchReason.REVISION_NOT_FOUND, f"{self._where} has no manifest {reference}"
                )
            if answer.status in (404, 410):
                raise FetchError(
                    FetchReason.NOT_FOUND,
                    f"{self._where} has no tag {reference}; check the address",
                )
            if answer.status != 200:
                raise of_status(
                    answer.status, self._where, hint=_HINT, after_s=answer.retry_after_s
                )
            content = answer.text()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if _DIGEST.fullmatch(reference) and digest != reference:
            raise FetchError(
                FetchReason.DIGEST_MISMATCH,
                f"{self._where}: the registry returned {digest} for {reference}",
            )
        return json_object(content, url), digest

    def _open(self, url: str) -> HttpResponse:
        """Signed in where the registry wants that."""
        answer = self._http.open(url, headers={"accept": _ACCEPT}, sign=self._sign)
        if answer.status != 401 or self._authorization:
            return answer
        challenge = answer.headers.get("www-authenticate", "")
        answer.close()
        self._sign_in(challenge)
        return self._http.open(url, headers={"accept": _ACCEPT}, sign=self._sign)

    def _sign_in(self, challenge: str) -> None:
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._basic:
            self._authorization = f"Basic {self._basic}"
            return
        parameters = dict(_PARAMETER.findall(rest))
        realm = parameters.get("realm", "")
        if scheme.lower() != "bearer" or not realm:
            raise FetchError(FetchReason.UNAUTHORIZED, f"{self._where} wants credentials; {_HINT}")
        if urlsplit(realm).scheme != "https" and self._base.startswith("https"):
            raise FetchError(
                FetchReason.FAILED, f"{self._where} sends its tokens unencrypted; refused"
            )
        query = {"scope": parameters.get("scope") or f"repository:{self._name}:pull"}
        if service := parameters.get("service"):
            query["service"] = service
        headers = {"authorization": f"Basic {self._basic}"} if self._basic else {}
        content, _ = self._http.get(
            f"{realm}?{urlencode(query)}",
            sign=lambda method, url, sent: headers,
            hint=_HINT,
            what=self._where,
        )
        granted = json_object(content, realm)
        token = granted.get("token") or granted.get("access_token")
        if not isinstance(token, str):
            raise FetchError(FetchReason.UNAUTHORIZED, f"{self._where} grants no token; {_HINT}")
        self._authorization = f"Bearer {token}"

    def _file(self, name: str, layer: dict[str, Any]) -> RemoteFile:
        digest, size = layer.get("digest"), layer.get("size")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise FetchError(
                FetchReason.FAILED, f"{self._where}: layer {name} has no sha256 digest"
            )
        return RemoteFile(
            name,
            f"{self._base}/blobs/{digest}",
            size=size if isinstance(size, int) else None,
            sha256=digest.partition(":")[2],
            sign=self._sign,
            hint=_HINT,
        )

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        return {"authorization": self._authorization} if self._authorization else {}


def _first(index: dict[str, Any], where: str) -> str:
    """Of an index: a model is the same on every platform."""
    for each in index.get("manifests") or []:
        digest = each.get("digest") if isinstance(each, dict) else None
        if isinstance(digest, str) and _DIGEST.fullmatch(digest):
            return digest
    raise FetchError(FetchReason.FAILED, f"{where} is an index without manifests")


def basic_credentials(host: str, credentials: Credentials) -> str:
    """USER:PASSWORD in base64, or ''."""
    user, password = credentials.get("OCI_USERNAME"), credentials.get("OCI_PASSWORD")
    if user and password:
        return base64.b64encode(f"{user}:{password}".encode()).decode()
    for path in _docker_files(credentials):
        try:
            docker_config = json.loads(path.read_bytes())
            auths = docker_config["auths"]
            entry = auths.get(host) or auths.get(f"https://{host}")
            if entry is None and host == "docker.io":
                entry = auths.get(_HUB_KEY)
            if not entry:
                continue
            if entry.get("auth"):
                return str(entry["auth"])
            pair = f"{entry['username']}:{entry['password']}"
            return base64.b64encode(pair.encode()).decode()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # an unreadable file: the registry reports what is missing
    return ""


def _docker_files(credentials: Credentials) -> list[Path]:
    files = [credentials.file(".dockerconfigjson"), credentials.file("config.json")]
    environ = credentials.environ
    folder = environ.get("DOCKER_CONFIG") or (
        f"{environ['HOME']}/.docker" if environ.get("HOME") else ""
    )
    return [path for path in files if path is not None] + (
        [Path(folder) / "config.json"] if folder else []
    )
