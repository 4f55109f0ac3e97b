"""Models in Google Cloud Storage, by its JSON API."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from octavo.fetch.errors import FetchError, FetchReason
from octavo.fetch.google_auth import GoogleToken
from octavo.fetch.source import (
    RemoteFile,
    SourceListing,
    choose,
    common_prefix,
    is_single,
    parts_of,
)
from octavo_common.remote.http import json_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Http

_ENDPOINT = "https://storage.googleapis.com"
_HINT = "set GOOGLE_APPLICATION_CREDENTIALS to the key of an account that may read it"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}")


class Gcs:
    """`location`: BUCKET/PREFIX, or BUCKET/…/FILE.gguf."""

    def __init__(self, location: str, http: Http, credentials: Credentials) -> None:
        self._bucket, _, self._path = location.partition("/")
        if not _BUCKET.fullmatch(self._bucket):
            raise FetchError(
                FetchReason.FAILED, f"{self._bucket[:100]!r} is not the name of a bucket"
            )
        self._http = http
        endpoint = credentials.get("STORAGE_EMULATOR_HOST") or _ENDPOINT
        self._endpoint = endpoint.rstrip("/") if "://" in endpoint else f"http://{endpoint}"
        self._token = GoogleToken(http, credentials)

    def find(self) -> SourceListing:
        path = self._path.rstrip("/")
        where = f"gs://{self._bucket}/{path}"
        if is_single(path):
            beside = {str(each["name"]): each for each in self._objects(common_prefix(path))}
            names = parts_of(path, beside, f"gs://{self._bucket}")
            return SourceListing(tuple(self._file(beside[name]) for name in names))
        prefix = f"{path}/" if path else ""
        objects = {str(o["name"]).removeprefix(prefix): o for o in self._objects(prefix)}
        return SourceListing(tuple(self._file(objects[name]) for name in choose(objects, where)))

    def _objects(self, prefix: str) -> Iterator[dict[str, Any]]:
        base = f"{self._endpoint}/storage/v1/b/{quote(self._bucket, safe='')}/o"
        token = ""
        while True:
            query = {"prefix": prefix, "delimiter": "/"} | ({"pageToken": token} if token else {})
            url = f"{base}?{urlencode(query, quote_via=quote)}"
            what = f"gs://{self._bucket}"
            content, _ = self._http.get(url, sign=self._sign, hint=_HINT, what=what)
            page = json_object(content, what)
            for each in page.get("items") or []:
                if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                    raise FetchError(FetchReason.FAILED, f"{what} does not list as it should")
                yield each
            token = str(page.get("nextPageToken") or "")
            if not token:
                return

    def _file(self, page: dict[str, Any]) -> RemoteFile:
        """Of the very generation that was listed, whatever is uploaded meanwhile."""
        name, size = str(page["name"]), str(page.get("size", ""))
        query = {"alt": "media"}
        if str(page.get("generation", "")).isdigit():
            query["generation"] = str(page["generation"])
        url = (
            f"{self._endpoint}/storage/v1/b/{quote(self._bucket, safe='')}/o/"
            f"{quote(name, safe='')}?{urlencode(query)}"
        )
        return RemoteFile(
            name.rpartition("/")[2],
            url,
            size=int(size) if size.isdigit() else None,
            md5=_hexadecimal(page.get("md5Hash")),  # composed objects have none
            sign=self._sign,
            hint=_HINT,
        )

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        token = self._token()
        return {"authorization": f"Bearer {token}"} if token else {}


def _hexadecimal(value: object) -> str:
    if not isinstance(value, str):
        return ""
    try:
        return base64.b64decode(value, validate=True).hex()
    except binascii.Error:
        return ""
