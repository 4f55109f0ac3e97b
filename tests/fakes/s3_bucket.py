"""A bucket over real sockets: PUT, DELETE, ranges and listings in pages, and accidents."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tests.fakes.model_store import Store, StoreReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.model_store import StoreRequest

ENVIRON = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret"}


@dataclass
class Bucket:
    """`accident` comes first, and may answer in its place. Objects are by key."""

    store: Store
    name: str = "kv"
    page: int = 1000  # objects in one part of a listing
    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, int] = field(default_factory=dict)
    accident: Callable[[StoreRequest], StoreReply | None] = lambda request: None
    num_puts: int = 0

    def __post_init__(self) -> None:
        self.store.routes[f"/{self.name}"] = self._answer

    def environ(self) -> dict[str, str]:
        return {**ENVIRON, "AWS_ENDPOINT_URL": self.store.url}

    def _answer(self, request: StoreRequest) -> StoreReply:
        if (reply := self.accident(request)) is not None:
            return reply
        if "Credential=AKID/" not in request.headers.get("authorization", ""):
            return StoreReply(403)
        digest = hashlib.sha256(request.body).hexdigest()
        if request.headers.get("x-amz-content-sha256") != digest:
            return StoreReply(400)
        key = unquote(request.path.removeprefix(f"/{self.name}/"))
        if not key:
            return self._listing(request)
        if request.method == "PUT":
            return self._put(key, request)
        if request.method == "DELETE":
            self.objects.pop(key, None)
            return StoreReply(204)
        content = self.objects.get(key)
        return StoreReply(404) if content is None else StoreReply(blob=content)

    def _put(self, key: str, request: StoreRequest) -> StoreReply:
        digest = base64.b64encode(hashlib.md5(request.body).digest()).decode()
        if request.headers.get("content-md5") != digest:
            return StoreReply(400)
        self.num_puts += 1
        self.objects[key] = request.body
        self.modified[key] = self.num_puts
        return StoreReply(200)

    def _listing(self, request: StoreRequest) -> StoreReply:
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        keys = sorted(key for key in list(self.objects) if key.startswith(prefix))
        if delimiter:
            keys = [key for key in keys if delimiter not in key[len(prefix) :]]
        first = int(request.query.get("continuation-token", 0))
        shown, rest = keys[first : first + self.page], keys[first + self.page :]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<LastModified>2026-01-01T00:00:00.{self.modified.get(key, 0):06d}Z</LastModified>"
            "</Contents>"
            for key in shown
        )
        more = f"<NextContinuationToken>{first + self.page}</NextContinuationToken>" if rest else ""
        body = f'<ListBucketResult xmlns="http://s3">{entries}{more}</ListBucketResult>'
        return StoreReply(200, body.encode())
