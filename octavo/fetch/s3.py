"""Models in S3, and in stores that speak its protocol."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo.fetch.source import (
    RemoteFile,
    SourceListing,
    choose,
    common_prefix,
    is_single,
    parts_of,
)
from octavo_common.remote.s3_bucket import HINT, S3Bucket

if TYPE_CHECKING:
    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Http
    from octavo_common.remote.s3_bucket import S3Object

_MD5 = re.compile(r"[0-9a-f]{32}")


class S3:
    """`location`: BUCKET/PREFIX, or BUCKET/…/FILE.gguf. AWS_ENDPOINT_URL names another store."""

    def __init__(self, location: str, http: Http, credentials: Credentials) -> None:
        bucket, _, self._path = location.partition("/")
        self._bucket = S3Bucket(bucket, http, credentials)

    def find(self) -> SourceListing:
        path = self._path.rstrip("/")
        root = f"s3://{self._bucket.name}"
        if is_single(path):
            beside = {each.key: each for each in self._bucket.objects(common_prefix(path))}
            names = parts_of(path, beside, root)
            return SourceListing(tuple(self._file(beside[name]) for name in names))
        prefix = f"{path}/" if path else ""
        objects = {each.key.removeprefix(prefix): each for each in self._bucket.objects(prefix)}
        chosen = choose(objects, f"{root}/{path}")
        return SourceListing(tuple(self._file(objects[name]) for name in chosen))

    def _file(self, found: S3Object) -> RemoteFile:
        # NOTE: an ETag is the MD5 of one that was uploaded in one piece and is not encrypted by a
        # key of its own. Of others it is no digest; the server says so when it is read.
        return RemoteFile(
            found.key.rpartition("/")[2],
            self._bucket.url(found.key),
            size=found.size,
            md5=found.etag if _MD5.fullmatch(found.etag) else "",
            sign=self._bucket.sign,
            hint=HINT,
        )
