"""Models in S3, and in stores that speak its protocol."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

from octavo.fetch.aws_identity import PodKeys
from octavo.fetch.errors import FetchError, FetchReason, of_status
from octavo.fetch.sigv4 import EMPTY_SHA256, AwsKey, signed_headers
from octavo.fetch.source import (
    RemoteFile,
    SourceListing,
    choose,
    common_prefix,
    is_single,
    parts_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from octavo.fetch.credentials import Credentials
    from octavo.fetch.http import Http

_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to a key that may list and read it, or give "
    "the pod's ServiceAccount a role that may"
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_MD5 = re.compile(r"[0-9a-f]{32}")
_REGION = re.compile(r"[a-z0-9-]{1,40}")


class _Object(NamedTuple):
    """What a listing says of one."""

    key: str
    size: int
    etag: str


class S3:
    """`location`: BUCKET/PREFIX, or BUCKET/…/FILE.gguf. AWS_ENDPOINT_URL names another store."""

    def __init__(
        self,
        location: str,
        http: Http,
        credentials: Credentials,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._bucket, _, self._path = location.partition("/")
        if not _BUCKET.fullmatch(self._bucket):
            raise FetchError(
                FetchReason.FAILED, f"{self._bucket[:100]!r} is not the name of a bucket"
            )
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

    def find(self) -> SourceListing:
        path = self._path.rstrip("/")
        where = f"s3://{self._bucket}/{path}"
        if is_single(path):
            beside = {each.key: each for each in self._objects(common_prefix(path))}
            names = parts_of(path, beside, f"s3://{self._bucket}")
            return SourceListing(tuple(self._file(beside[name]) for name in names))
        prefix = f"{path}/" if path else ""
        objects = {each.key.removeprefix(prefix): each for each in self._objects(prefix)}
        return SourceListing(tuple(self._file(objects[name]) for name in choose(objects, where)))

    def _objects(self, prefix: str) -> Iterator[_Object]:
        """Each one directly below."""
        token = ""
        while True:
            query = {"list-type": "2", "prefix": prefix, "delimiter": "/"}
            if token:
                query["continuation-token"] = token
            root = _parse(self._get(query), self._bucket)
            for each in root.iter(f"{_space(root)}Contents"):
                entry = {_plain(child.tag): child.text or "" for child in each}
                size = entry.get("Size", "")
                if not size.isdigit() or "Key" not in entry:
                    raise FetchError(FetchReason.FAILED, f"s3://{self._bucket} lists no sizes")
                yield _Object(entry["Key"], int(size), entry.get("ETag", "").strip('"'))
            token = root.findtext(f"{_space(root)}NextContinuationToken") or ""
            if not token:
                return

    def _get(self, query: Mapping[str, str]) -> bytes:
        """In the region where the bucket is, which may be known only from its first response."""
        what = f"s3://{self._bucket}"
        for _ in range(2):
            url = f"{self._base()}/?{urlencode(query, quote_via=quote)}"
            with self._http.open(url, sign=self._sign) as answer:
                if answer.status == 200:
                    return answer.text()
                region = answer.headers.get("x-amz-bucket-region", "")
                status, after_s = answer.status, answer.retry_after_s
            if status in (301, 400, 403) and region != self._region and _REGION.fullmatch(region):
                self._region = region
                continue
            break
        raise of_status(status, what, hint=_HINT, after_s=after_s)

    def _file(self, found: _Object) -> RemoteFile:
        # NOTE: an ETag is the MD5 of one that was uploaded in one piece and is not encrypted by a
        # key of its own. Of others it is no digest; the server says so when it is read.
        return RemoteFile(
            found.key.rpartition("/")[2],
            f"{self._base()}/{quote(found.key, safe='/-_.~')}",
            size=found.size,
            md5=found.etag if _MD5.fullmatch(found.etag) else "",
            sign=self._sign,
            hint=_HINT,
        )

    def _base(self) -> str:
        if self._endpoint:
            return f"{self._endpoint}/{self._bucket}"
        if "." in self._bucket:  # the certificate covers one label only
            return f"https://s3.{self._region}.amazonaws.com/{self._bucket}"
        return f"https://{self._bucket}.s3.{self._region}.amazonaws.com"

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Nothing for a public bucket."""
        key = self._keys()
        if key is None:
            return {}
        return signed_headers(
            key, method, url, headers,
            region=self._region, service="s3", now=self._now(), payload_sha256=EMPTY_SHA256,
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
