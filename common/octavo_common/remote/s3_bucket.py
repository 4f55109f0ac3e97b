"""A bucket in S3, and in stores that speak its protocol: signed requests and listings."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

from octavo_common.remote.aws_identity import PodKeys
from octavo_common.remote.errors import FetchError, FetchReason, of_status
from octavo_common.remote.sigv4 import EMPTY_SHA256, AwsKey, signed_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Http, HttpResponse

HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key that may list and read it, or give "
    "the pod's ServiceAccount a role that may"
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_REGION = re.compile(r"[a-z0-9-]{1,40}")


class S3Object(NamedTuple):
    """What a listing says of one."""

    key: str
    size: int
    etag: str
    modified: str  # in ISO 8601, UTC: later ones compare as greater


class S3Bucket:
    """AWS_ENDPOINT_URL names another store. Safe to use from many threads."""

    def __init__(
        self,
        name: str,
        http: Http,
        credentials: Credentials,
        *,
        hint: str = HINT,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`hint` says which credentials would help. Raises FetchError for what is no name."""
        if not _BUCKET.fullmatch(name):
            raise FetchError(FetchReason.FAILED, f"{name[:100]!r} is not the name of a bucket")
        self.name, self._hint = name, hint
        self._http = http
        self._now = now
        self._region = credentials.get("AWS_REGION", "AWS_DEFAULT_REGION") or "us-east-1"
        self._endpoint = credentials.get("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL").rstrip("/")
        key_id = credentials.get("AWS_ACCESS_KEY_ID")
        secret = credentials.get("AWS_SECRET_ACCESS_KEY")
        token = credentials.get("AWS_SESSION_TOKEN")
        own = AwsKey(key_id, secret, token) if key_id and secret else None
        pod = PodKeys(http, credentials, region=self._region)
        self._keys: Callable[[], AwsKey | None] = pod if own is None else lambda: own

    def objects(self, prefix: str, *, delimiter: str = "/") -> Iterator[S3Object]:
        """Each one directly below; with an empty `delimiter`, all below."""
        token = ""
        while True:
            query = {"list-type": "2", "prefix": prefix}
            if delimiter:
                query["delimiter"] = delimiter
            if token:
                query["continuation-token"] = token
            root = _parse(self._list(query), self.name)
            for each in root.iter(f"{_space(root)}Contents"):
                entry = {_plain(child.tag): child.text or "" for child in each}
                size = entry.get("Size", "")
                if not size.isdigit() or "Key" not in entry:
                    raise FetchError(FetchReason.FAILED, f"s3://{self.name} lists no sizes")
                yield S3Object(
                    entry["Key"], int(size), entry.get("ETag", "").strip('"'),
                    entry.get("LastModified", ""),
                )  # fmt: skip
            token = root.findtext(f"{_space(root)}NextContinuationToken") or ""
            if not token:
                return

    def get(self, key: str, first: int, num_bytes: int) -> bytes:
        """A part of an object, shorter where that ends before. Raises FetchError, Passing where
        the connection breaks off."""
        headers = {"range": f"bytes={first}-{first + num_bytes - 1}"}
        with self._request("GET", key, headers) as answer:
            if answer.status == 206:
                return answer.text(max_bytes=num_bytes)
            if answer.status == 416:
                return b""
            raise self._refusal(answer, key)

    def put(self, key: str, content: bytes) -> None:
        """A whole object or none: the store compares its digest. Raises FetchError."""
        headers = {"content-md5": b64encode(hashlib.md5(content).digest()).decode()}
        with self._request("PUT", key, headers, content) as answer:
            if answer.status != 200:
                raise self._refusal(answer, key)

    def delete(self, key: str) -> None:
        """It may be gone already. Raises FetchError."""
        with self._request("DELETE", key) as answer:
            if answer.status not in (200, 204, 404):
                raise self._refusal(answer, key)

    def _request(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> HttpResponse:
        digest = EMPTY_SHA256 if body is None else hashlib.sha256(body).hexdigest()

        def sign(method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
            return self._sign(method, url, headers, digest)

        for _ in range(2):
            answer = self._http.open(
                self.url(key), headers=headers, sign=sign, method=method, body=body
            )
            if not self._has_moved(answer):
                break
            answer.close()
        return answer

    def _refusal(self, answer: HttpResponse, key: str) -> FetchError:
        return of_status(
            answer.status, self._name_of(key), hint=self._hint, after_s=answer.retry_after_s
        )

    def _name_of(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def url(self, key: str) -> str:
        return f"{self._base()}/{quote(key, safe='/-_.~')}"

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Of a request without a body. Nothing for a public bucket."""
        return self._sign(method, url, headers, EMPTY_SHA256)

    def _list(self, query: Mapping[str, str]) -> bytes:
        """In the region where the bucket is, which may be known only from its first response."""
        for _ in range(2):
            url = f"{self._base()}/?{urlencode(query, quote_via=quote)}"
            with self._http.open(url, sign=self.sign) as answer:
                if answer.status == 200:
                    return answer.text()
                if self._has_moved(answer):
                    continue
                break
        raise of_status(
            answer.status, f"s3://{self.name}", hint=self._hint, after_s=answer.retry_after_s
        )

    def _has_moved(self, answer: HttpResponse) -> bool:
        """Whether another region is right, which is used from now on."""
        region = answer.headers.get("x-amz-bucket-region", "")
        moved = answer.status in (301, 400, 403) and region != self._region
        if moved and _REGION.fullmatch(region):
            self._region = region
            return True
        return False

    def _base(self) -> str:
        if self._endpoint:
            return f"{self._endpoint}/{self.name}"
        if "." in self.name:  # the certificate covers one label only
            return f"https://s3.{self._region}.amazonaws.com/{self.name}"
        return f"https://{self.name}.s3.{self._region}.amazonaws.com"

    def _sign(
        self, method: str, url: str, headers: Mapping[str, str], payload_sha256: str
    ) -> Mapping[str, str]:
        key = self._keys()
        if key is None:
            return {}
        return signed_headers(
            key, method, url, headers,
            region=self._region, service="s3", now=self._now(), payload_sha256=payload_sha256,
        )  # fmt: skip


def _parse(content: bytes, bucket: str) -> ElementTree.Element:
    if b"<!" in content:  # no listing has declarations; entities could grow without bound
        raise FetchError(FetchReason.FAILED, f"s3://{bucket} answers with what is no listing")
    try:
        return ElementTree.fromstring(content)
    except ElementTree.ParseError:
        raise FetchError(
            FetchReason.FAILED, f"s3://{bucket} answers with what is no listing"
        ) from None


def _space(root: ElementTree.Element) -> str:
    return root.tag[: root.tag.index("}") + 1] if root.tag.startswith("{") else ""


def _plain(tag: str) -> str:
    return tag.rpartition("}")[2]
