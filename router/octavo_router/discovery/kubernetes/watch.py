"""List and watch of one kind of object: a mirror that is right again soon after any failure.

    list (in pages) ──► watch from its resourceVersion ──► ended as agreed ──► watch on
      ▲                        │
      └── pause ◄── error, 410, silence, cut off: what was missed is unknown, so list again

A watch that freezes looks like a quiet cluster. The API server ends each watch after the time that
we ask for, and sends bookmarks meanwhile; when neither comes in time, the watch is dead.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from octavo_router.errors import Unreachable
from octavo_router.http.fetch import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.discovery.kubernetes.account import ServiceAccount
    from octavo_router.discovery.kubernetes.objects import KubernetesObject
    from octavo_router.metrics import DiscoveryCounts

logger = logging.getLogger(__name__)

T = TypeVar("T", bound="KubernetesObject")

JSON = "application/json"
MAX_EVENT_BYTES = 8 * 2**20  # an object is at most 1.5 MB in etcd


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times in seconds."""

    page_size: int = 500
    connect_s: float = 5.0
    answer_s: float = 30.0
    watch_s: float = 60.0  # how long one watch may last; short, so that a freeze shows soon
    grace_s: float = 10.0  # after which a watch that did not end is dead
    min_watch_s: float = 0.5  # a watch that ends sooner is a failure, not an end as agreed
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0


class Forbidden(Unreachable):
    """The Role does not allow it, or is gone with its namespace."""


class WatchExpired(Unreachable):
    """The resourceVersion is too old: list again, at once."""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Identity(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


class _Identified(msgspec.Struct):
    metadata: _Identity


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class Mirror(Generic[T]):
    """All objects of one kind that match, by namespace and name. Tells when they changed."""

    def __init__(
        self,
        path: str,
        kind: type[T],
        account: ServiceAccount,
        *,
        selector: str = "",
        counts: DiscoveryCounts,
        on_change: Callable[[], None],
        settings: WatchSettings,
        rng: random.Random | None = None,
    ) -> None:
        self.objects: dict[tuple[str, str], T] = {}
        self.is_synced = False
        self.is_forbidden = False  # by the last answer; what was known before stays
        self._path = path
        self._account = account
        self._selector = selector
        self._counts = counts
        self._on_change = on_change
        self._settings = settings
        self._rng = rng or random.Random()
        self._version = ""
        self._objects = msgspec.json.Decoder(kind)
        self._identities = msgspec.json.Decoder(_Identified)
        self._events = msgspec.json.Decoder(_Event)

    async def run(self) -> None:
        """Ends only by being cancelled."""
        num_failures = 0
        while True:
            try:
                await self._list()
                while True:
                    await self._watch()
                    num_failures = 0
            except WatchExpired:
                self._counts.relists += 1
                num_failures += 1
            except Unreachable as error:
                self._note_forbidden(is_forbidden=isinstance(error, Forbidden))
                self._counts.errors += 1
                self._counts.relists += 1
                num_failures += 1
                logger.warning(
                    "Lost the Kubernetes API", extra={"path": self._path, "reason": str(error)}
                )
            await asyncio.sleep(self._pause_s(num_failures))

    # -- list

    async def _list(self) -> None:
        found: dict[tuple[str, str], T] = {}
        token = ""
        async with await self._connect() as connection:
            while True:
                query = {"limit": str(self._settings.page_size), "continue": token}
                meta, items = self._page(await self._get(connection, query))
                for item in items:
                    found[self._identity(item).key] = self._object(item)
                token = meta.continue_
                if not token:
                    break
        self._version = meta.resource_version
        self._note_forbidden(is_forbidden=False)
        self._heard()
        is_changed = found != self.objects or not self.is_synced
        self.objects = found
        self.is_synced = True
        if is_changed:
            self._on_change()

    async def _get(self, connection: Connection, query: dict[str, str]) -> bytes:
        response = await connection.get(
            self._url(query), headers=self._headers(), timeout_s=self._settings.answer_s
        )
        if response.status == 410:
            raise WatchExpired("the list's pages expired")
        if response.status != 200:
            kind = Forbidden if response.status == 403 else Unreachable
            raise kind(_refusal(response.status, response.body, self._path))
        return response.body

    def _page(self, body: bytes) -> tuple[_ListMeta, list[msgspec.Raw]]:
        try:
            page = msgspec.json.decode(body, type=_Page)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{self._path} is no list: {error}") from error
        return page.metadata, page.items

    # -- watch

    async def _watch(self) -> None:
        """Returns when the API server ended it as agreed."""
        settings = self._settings
        watch_s = settings.watch_s * (0.75 + 0.5 * self._rng.random())
        query = {
            "watch": "1",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(watch_s))),
        }
        lines = _Lines(self._take)
        began_at = asyncio.get_running_loop().time()
        async with await self._connect() as connection:
            response = await connection.stream(
                self._url(query),
                lines.feed,
                content_type=JSON,
                headers=self._headers(),
                timeout_s=settings.answer_s,
            )
            if not response.is_stream:
                if response.status == 410:
                    raise WatchExpired("the resourceVersion is too old")
                raise Unreachable(_refusal(response.status, response.body, self._path))
            try:
                async with asyncio.timeout(watch_s + settings.grace_s):
                    await connection.ended()
            except TimeoutError:
                raise Unreachable("the watch froze") from None
        self._heard()
        if asyncio.get_running_loop().time() - began_at < settings.min_watch_s:
            raise Unreachable("the watch ended at once")  # with a pause, not in a busy loop

    def _take(self, line: bytes) -> None:
        try:
            event = self._events.decode(line)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"an event cannot be read: {error}") from error
        self._heard()
        match event.type:
            case "ADDED" | "MODIFIED":
                self._put(event.object)
            case "DELETED":
                gone = self._identity(event.object)
                self._version = gone.resource_version
                known = self.objects.get(gone.key)
                if known is not None and known.metadata.uid == gone.uid:  # else it was replaced
                    del self.objects[gone.key]
                    self._on_change()
            case "BOOKMARK":
                self._version = self._identity(event.object).resource_version
            case "ERROR":
                status = self._status(event.object)
                kind = WatchExpired if status.code == 410 else Unreachable
                raise kind(f"the watch ended with {status.code}: {status.message}")

    def _put(self, raw: msgspec.Raw) -> None:
        identity, value = self._identity(raw), self._object(raw)
        self._version = identity.resource_version
        if self.objects.get(identity.key) != value:
            self.objects[identity.key] = value
            self._on_change()

    # -- small things

    def _note_forbidden(self, *, is_forbidden: bool) -> None:
        if is_forbidden != self.is_forbidden:
            self.is_forbidden = is_forbidden
            self._on_change()

    def _status(self, raw: msgspec.Raw) -> _Status:
        try:
            return msgspec.json.decode(raw, type=_Status)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{self._path}: an error cannot be read: {error}") from error

    def _identity(self, raw: msgspec.Raw) -> _Identity:
        try:
            return self._identities.decode(raw).metadata
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{self._path}: an object has no metadata: {error}") from error

    def _object(self, raw: msgspec.Raw) -> T:
        try:
            return self._objects.decode(raw)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{self._path}: an object cannot be read: {error}") from error

    async def _connect(self) -> Connection:
        return await Connection.open(self._account.target, timeout_s=self._settings.connect_s)

    def _headers(self) -> dict[str, str]:
        try:
            return self._account.headers()
        except OSError as error:
            raise Unreachable(f"the service account's token: {error}") from error

    def _url(self, query: dict[str, str]) -> str:
        query = {**query, "labelSelector": self._selector}
        return f"{self._path}?{urlencode({k: v for k, v in query.items() if v})}"

    def _heard(self) -> None:
        self._counts.heard_at = asyncio.get_running_loop().time()

    def _pause_s(self, num_failures: int) -> float:
        settings = self._settings
        full = min(settings.backoff_max_s, settings.backoff_min_s * 2.0 ** min(num_failures, 16))
        return full * (0.5 + 0.5 * self._rng.random())


class _Lines:
    """Whole lines out of pieces, bounded."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(rest) > MAX_EVENT_BYTES:
            raise Unreachable(f"an event exceeds {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.strip():
                self._take(bytes(line))


def _refusal(status: int, body: bytes, path: str) -> str:
    if status in (401, 403):
        return f"the service account may not list and watch {path} ({status}): see its Role"
    return f"{path} answers {status}: {body[:200].decode('utf-8', 'replace')}"
