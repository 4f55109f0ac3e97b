"""Models behind plain http(s):// addresses: one file, or a folder with the usual names in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from octavo.fetch.errors import FetchError, FetchReason, of_status
from octavo.fetch.source import RemoteFile, SourceListing, is_single
from octavo_common.remote.http import json_object
from octavo_engine.weights.gguf_parts import all_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_common.remote.credentials import Credentials
    from octavo_common.remote.http import Http

_HINT = "set HTTP_BEARER_TOKEN to a token that may read it"
_OPTIONAL = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


class Web:
    """Plain HTTP lists nothing: config.json and the weights' index list the files."""

    def __init__(self, uri: str, http: Http, credentials: Credentials) -> None:
        self._uri = uri
        self._http = http
        self._token = credentials.get("HTTP_BEARER_TOKEN")

    def find(self) -> SourceListing:
        parts = urlsplit(self._uri)
        if "@" in parts.netloc:
            raise FetchError(FetchReason.FAILED, f"no user names in addresses; {_HINT}")
        path = unquote(parts.path)
        if is_single(path):
            name = path.rpartition("/")[2]
            if len(parts_of_model := all_parts(name)) == 1:
                return SourceListing((self._file(name, self._uri),))
            found = (self._file(each, self._beside(each)) for each in parts_of_model)
            return SourceListing(tuple(found))
        names = ["config.json", *self._weights()]
        files = [self._file(name, self._url(name)) for name in names]
        files += [self._file(name, self._url(name), is_optional=True) for name in _OPTIONAL]
        return SourceListing(tuple(files))

    def _weights(self) -> list[str]:
        index = "model.safetensors.index.json"
        url = self._url(index)
        with self._http.open(url, sign=self._sign) as answer:
            if answer.status in (404, 410):
                return ["model.safetensors"]
            if answer.status != 200:
                raise of_status(answer.status, url, hint=_HINT, after_s=answer.retry_after_s)
            listing: dict[str, Any] = json_object(answer.text(), url)
        shards = listing.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(n, str) for n in shards.values()):
            raise FetchError(FetchReason.FAILED, f"{url} has no weight_map as it should")
        return [index, *sorted(set(shards.values()))]

    def _url(self, name: str) -> str:
        parts = urlsplit(self._uri)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()

    def _beside(self, name: str) -> str:
        parts = urlsplit(self._uri)
        return parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(name)}").geturl()

    def _file(self, name: str, url: str, *, is_optional: bool = False) -> RemoteFile:
        return RemoteFile(name, url, sign=self._sign, hint=_HINT, is_optional=is_optional)

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self._token}"} if self._token else {}
