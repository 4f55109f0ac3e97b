"""Listens to one endpoint for as long as it exists: its stream, or by asking where it has none.

connect ──► stream? ──200──► follow frames ──► gap, silence, closed ──┐
   ▲           └──404──► plain server: poll ──► does not answer ──────┤
   └──────────── pause 50 ms .. 2 s, none on news of discovery ◄──────┘
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.protocol.endpoints import STREAM_PATH
from octavo_engine.protocol.loading import read_progress
from octavo_engine.protocol.stream import CONTENT_TYPE
from octavo_router.errors import Unreachable
from octavo_router.http.fetch import Connection
from octavo_router.signals.follow import Follower, Stranger, StreamBroken
from octavo_router.signals.frames import FrameReader
from octavo_router.signals.plain_server import PlainFollower
from octavo_router.signals.settings import backoff_s

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from octavo_engine.protocol.loading import LoadProgress
    from octavo_router.endpoints.endpoint import Endpoint, State
    from octavo_router.http.deadlines import DeadlineTick
    from octavo_router.http.fetch import FetchResponse
    from octavo_router.metrics import SignalCounts
    from octavo_router.residency.tier_slots import SharedSlots
    from octavo_router.signals.interfaces import ResidencySink, States
    from octavo_router.signals.settings import SignalSettings

logger = logging.getLogger(__name__)

# Labels of a spec: ZMQ addresses (tcp://host:port) of a plain server's KV events.
KV_EVENTS_LABEL = "kv-events"
KV_REPLAY_LABEL = "kv-replay"

# Statuses by which servers say that they do not know the path. Some guard unknown ones with a key.
_NO_STREAM = frozenset({400, 401, 403, 404, 405, 406, 501})


class _NotYet(msgspec.Struct):
    """Of the body with which an engine refuses its stream while it loads."""

    state: str = ""
    progress: float | None = None
    loading: Any = None


class Subscription:
    """One task. `run` ends only by being cancelled."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        index: ResidencySink,
        states: States,
        counts: SignalCounts,
        settings: SignalSettings,
        now: Callable[[], float],
        rng: Random,
        deadlines: DeadlineTick,
        shared: SharedSlots,
    ) -> None:
        self.endpoint = endpoint
        self.has_tried = asyncio.Event()  # the first attempt came to something
        self._index = index
        self._states = states
        self._counts = counts
        self._settings = settings
        self._now = now
        self._rng = rng
        self._reported: tuple[State, str] = ("connecting", "")
        self._wake = asyncio.Event()
        self._connection: Connection | None = None
        self._num_failures = 0
        self._follower = Follower(
            endpoint,
            index,
            counts=counts,
            set_state=self._set_state,
            on_changed=states.changed,
            now=now,
            shared=shared,
        )
        self._plain = PlainFollower(
            endpoint,
            settings,
            counts=counts,
            set_state=self._set_state,
            on_changed=states.changed,
            forget=self._follower.forget,
            now=now,
            rng=rng,
            deadlines=deadlines,
        )

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except Unreachable as error:
                self._lost(error)
            finally:
                self.has_tried.set()
            await self._pause()

    def discovery_changed(self) -> None:
        """Its spec is another: the address may be, and now is the moment to look."""
        self._set_state(self.endpoint, *self._reported)
        connection = self._connection
        if connection is not None and self._address_differs(connection):
            connection.fail(Unreachable("its address changed"))
        self._num_failures = 0
        self._wake.set()

    def stop(self) -> None:
        """No frame is taken after this, though the task may end a little later."""
        if self._connection is not None:
            self._connection.close()

    # -- one life of a connection

    async def _follow(self) -> None:
        spec = self.endpoint.spec
        if spec.kind == "openai":
            await self._follow_plain()
            return
        target = self._settings.target(spec)
        try:
            connection = await Connection.open(target, timeout_s=self._settings.connect_s)
        except Unreachable as error:
            self._counts.connects.add("refused" if error.is_refused else "failed")
            self.endpoint.loading = self.endpoint.progress = None
            raise
        async with connection:
            response = await self._open_stream(connection)
            self.endpoint.loading, self.endpoint.progress = _loaded(response)
            if response.is_stream:
                await self._listen(connection)
                raise Unreachable("the engine closed the stream")
        if response.status in _NO_STREAM or response.status == 200:
            self._no_stream(response)
            await self._follow_plain()
        raise Unreachable(f"{STREAM_PATH} answers {response.status}")

    async def _follow_plain(self) -> None:
        """By polling, and by its KV events where discovery found them."""
        labels = dict(self.endpoint.spec.labels)
        live = labels.get(KV_EVENTS_LABEL)
        if not live:
            await self._plain.follow()
            return
        tally = self._counts.kv_events
        from octavo_router.signals.kv_follow import KvFollower  # few engines have such events
        from octavo_router.signals.kv_residency import KvResidency

        residency = KvResidency(self._index, self.endpoint.slot, tally)
        self.endpoint.tier_keys = residency.tiers.held
        follower = KvFollower(live, labels.get(KV_REPLAY_LABEL, ""), residency, tally)
        task = asyncio.create_task(follower.follow(), name=f"KV events of {live}")
        try:
            await self._plain.follow()
        finally:
            self.endpoint.tier_keys = {}
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _open_stream(self, connection: Connection) -> FetchResponse:
        reader, follower = FrameReader(), self._follower

        def take(data: bytes) -> None:
            # Hot path: runs where the bytes arrive, without a task switch.
            for frame in reader.feed(data):
                follower.take(frame)

        follower.begin()
        self._connection = connection
        response = await connection.stream(
            self.endpoint.spec.address.prefix + STREAM_PATH,
            take,
            content_type=CONTENT_TYPE,
            headers=self._settings.headers(self.endpoint.spec),
            timeout_s=self._settings.answer_s,
        )
        self._counts.connects.add("ok" if response.is_stream else str(response.status))
        return response

    async def _listen(self, connection: Connection) -> None:
        began_at = self._now()
        loop = asyncio.get_running_loop()
        silence_s = self._settings.silence_s
        timer: asyncio.TimerHandle

        def watch() -> None:
            nonlocal timer
            last_at = self._follower.last_frame_at or began_at
            left_s = last_at + silence_s - self._now()
            if left_s <= 0.0:
                connection.fail(StreamBroken("silence", f"nothing was heard for {silence_s:g} s"))
                return
            timer = loop.call_later(left_s, watch)

        timer = loop.call_later(silence_s, watch)
        try:
            await connection.ended()
        finally:
            timer.cancel()
            self._connection = None
            if self._follower.is_whole and self._now() - began_at >= self._settings.backoff_max_s:
                self._num_failures = 0

    def _no_stream(self, response: FetchResponse) -> None:
        if self.endpoint.spec.kind == "octavo":
            what = "refuses the router's key" if response.status in (401, 403) else "has no stream"
            if b"client_certificate_required" in response.body:
                what = "refuses the router's certificate"
            raise Unreachable(f"the engine {what} ({response.status} for {STREAM_PATH})")

    # -- between two lives

    def _lost(self, error: Unreachable) -> None:
        self._follower.forget()
        kind = error.kind if isinstance(error, StreamBroken) else "lost"
        self._counts.breaks.add(kind)
        endpoint = self.endpoint
        if isinstance(error, Stranger):
            self._num_failures = 16  # it will not turn into ours; look now and then
        keeps_state = isinstance(error, StreamBroken) and kind != "silence"
        if keeps_state and endpoint.reported_state in ("ready", "draining"):
            # What it reported is void, but it answers: it stays in rotation without its prefixes.
            logger.warning("Lost the state stream of an engine", extra=self._fields(error))
            return
        was = endpoint.reported_state
        self._set_state(endpoint, "connecting" if was == "connecting" else "down", str(error))
        if was in ("ready", "draining"):
            logger.warning("Lost an engine", extra=self._fields(error))

    async def _pause(self) -> None:
        """Short at first: a stream that broke is often a stream that comes back."""
        self._wake.clear()
        pause_s = backoff_s(self._num_failures, self._settings, self._rng.random())
        self._num_failures += 1
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _set_state(self, endpoint: Endpoint, state: State, reason: str) -> None:
        if state == "ready" and endpoint.reported_state != "ready":
            logger.info("Engine is ready", extra=self._fields())
        self._reported = (state, reason)
        self.has_tried.set()
        if state == "ready" and not endpoint.spec.is_ready:
            state, reason = "down", "its platform says that it is not ready"
        self._states.report(endpoint, state, reason)

    def _address_differs(self, connection: Connection) -> bool:
        address, target = self.endpoint.spec.address, connection.target
        return (address.host, address.port) != (target.host, target.port)

    def _fields(self, error: Unreachable | None = None) -> dict[str, object]:
        spec = self.endpoint.spec
        return {
            "endpoint": spec.address.authority,
            "pool": spec.pool,
            "kind": self.endpoint.kind,
            "reason": str(error) if error else None,
        }


def _loaded(response: FetchResponse) -> tuple[float | None, LoadProgress | None]:
    """What an engine that still loads reports of itself; nothing from all others."""
    if response.status != 503:
        return None, None
    try:
        body = msgspec.json.decode(response.body, type=_NotYet)
    except (ValueError, RecursionError):
        return None, None
    if body.state != "loading" or body.progress is None or not 0.0 <= body.progress <= 1.0:
        return None, None
    return body.progress, read_progress(body.loading)
