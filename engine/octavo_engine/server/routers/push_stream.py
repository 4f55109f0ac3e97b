"""Load and residency of one engine, pushed to every subscribed router as they change.

The hub merges what the core's steps report and sends it on, at most every few milliseconds, to all
subscribers. It holds no keys: a subscriber that joins is given a snapshot that the core makes, and
what comes after it. A subscriber that does not read is cut off; it will come again.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from octavo_engine import __version__
from octavo_engine.config import BLOCK_SIZE, join_address
from octavo_engine.protocol.kv_events import DISK_MEDIUM, HOST_MEDIUM, SHARED_MEDIUM, TIER_MEDIA
from octavo_engine.protocol.stream import (
    DELTA,
    DRAINING,
    HEARTBEAT_S,
    HELLO,
    KEY_BYTES,
    SNAPSHOT,
    STORED_BYTES,
    Delta,
    Draining,
    Hello,
    Load,
    Snapshot,
)
from octavo_engine.server.http.errors import unavailable
from octavo_engine.state.labels import ResidencyChange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from octavo_engine.config import EngineConfig
    from octavo_engine.metrics import EngineMetrics
    from octavo_engine.server.admission import RequestAdmission
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.state.kv_source import KVSource
    from octavo_engine.state.outputs import EngineStats, StepOutput

FLUSH_S = 0.005  # between frames that carry residency
LOAD_S = 0.02  # between frames that carry load
MAX_QUEUE_BYTES = 16 * 2**20  # of frames that a subscriber has not read; a snapshot does not count
SNAPSHOT_BYTES = 2**20 // STORED_BYTES * STORED_BYTES  # in one frame
SMOOTHING = 0.1  # weight of the newest step in the typical one
NO_CHANGE = ResidencyChange()

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame(kind: str, fields: Hello | Snapshot | Delta | Draining) -> bytes:
    body = _encoder.encode((kind, fields))
    return _LENGTH.pack(len(body)) + body


class Subscriber:
    """Frames on their way to one router. Lives in the task that made it."""

    def __init__(self) -> None:
        self.is_live = False  # has its snapshot, and gets deltas
        self.is_cut = False
        self._task = asyncio.current_task()
        self._seq = 0
        self.adapters: Mapping[str, str] = {}  # that it knows of
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._has_ended = False
        self._news = asyncio.Event()

    @property
    def has_news(self) -> bool:
        return bool(self._frames)

    def start(self, snapshot: bytes, tiers: Mapping[str, bytes]) -> None:
        """From here on it gets deltas, after the snapshot."""
        self.is_live = True
        self._frames += _snapshot_frames(snapshot, tiers)
        self._news.set()

    def delta(
        self, change: ResidencyChange, load: Load | None, adapters: Mapping[str, str]
    ) -> None:
        self._seq += 1
        delta = Delta(self._seq, change.stored, change.evicted, load, tiers=change.tiers)
        if adapters != self.adapters:
            self.adapters = adapters
            delta = replace(delta, adapters=list(adapters), adapter_digests=dict(adapters))
        self.put(frame(DELTA, delta))

    def put(self, payload: bytes) -> None:
        if self.is_cut:
            return
        self._frames.append(payload)
        self._num_bytes += len(payload)
        self._news.set()
        if self._num_bytes > MAX_QUEUE_BYTES:
            self.is_cut = True
            self._frames.clear()
            if self._task is not None:
                self._task.cancel()  # it waits for a client that does not read

    def end(self) -> None:
        """What is queued is sent, nothing after it."""
        self._has_ended = True
        self._news.set()

    async def read(self) -> bytes:
        """All that is there, once something is; empty at the end."""
        while not self._frames and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        payload = b"".join(self._frames)
        self._frames.clear()
        self._num_bytes = 0
        return payload


class SubscriberHub:
    """All subscribers of one engine. A StepListener; belongs to the event loop."""

    def __init__(
        self,
        engine: ServedEngine,
        admission: RequestAdmission,
        metrics: EngineMetrics,
        pod_uid: str,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._pod_uid = pod_uid
        self._adapters: Mapping[str, str] = {}  # names that are served, and their contents
        self._feed = engine.residency
        self._feed.listen(self)
        self._subscribers: set[Subscriber] = set()
        self._changes: list[ResidencyChange] = []
        self._stats = engine.stats
        self._load = Load()
        self._step_s = 0.0
        self._sent_at = self._load_at = self._changes_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0
        self._draining: Draining | None = None
        # Whether a router ever subscribed. Until then prompts are not labelled.
        self.was_joined = False

    def __len__(self) -> int:
        return len(self._subscribers)

    def subscribe(self) -> Subscriber:
        """Raises 503 while there is no core."""
        engine = self._engine
        state = engine.health().state
        if state not in ("ready", "draining"):
            raise unavailable("loading", f"The engine is {state}.", retry_after_s=1)
        info = engine.info
        self.was_joined = True
        subscriber = Subscriber()
        subscriber.adapters = self._adapters
        transfer = engine.config.own_kv_transfer
        hello = Hello(
            epoch=self._feed.epoch,
            model=info.names[0],
            names=[*info.names, *self._adapters],
            adapters=list(self._adapters),
            adapter_digests=dict(self._adapters),
            block_size=BLOCK_SIZE,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            version=__version__,
            architecture=info.architecture,
            format=info.format,
            vocab_size=info.vocab_size,
            kv_role="" if transfer is None else transfer.kv_role,
            kv_address=_address(info.kv_source),
            kv_follows=transfer is not None,
            tiers=_tiers(engine.config),
            kv_store=info.kv_store,
            pod_uid=self._pod_uid,
        )
        subscriber.put(frame(HELLO, hello))
        self._subscribers.add(subscriber)
        self._feed.watch(on=True)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        self._subscribers.discard(subscriber)
        if not self._subscribers:
            self._feed.watch(on=False)
            self._changes.clear()
            self._stop_timer()

    def set_adapters(self, digests: Mapping[str, str]) -> None:
        """By name. Informs all subscribers, later ones too."""
        self._adapters = digests
        for subscriber in self._subscribers:
            if subscriber.is_live:
                subscriber.delta(NO_CHANGE, None, digests)

    def drain(self, deadline_s: float) -> None:
        """Informs all subscribers, later ones too."""
        if self._draining is not None:
            return
        self._draining = Draining(deadline_s)
        for subscriber in self._subscribers:
            if subscriber.is_live:
                subscriber.put(frame(DRAINING, self._draining))

    # ── what the feed calls ──

    def on_step(self, step: StepOutput) -> None:
        """Hot path: once per step."""
        if step.stats is not None:
            self._metrics.note_step(step.stats)
        if not self._subscribers:
            return
        if step.stats is not None:
            self._note(step.stats)
        residency = step.residency
        if residency is not None:
            if residency.stored or residency.evicted or residency.tiers:
                self._changes.append(residency)
            if residency.snapshot is not None:
                self._flush()  # what came before belongs to those who were there before
                self._start(residency.snapshot, residency.snapshot_tiers)
        if self._changes:
            self._wake_at(self._changes_at + FLUSH_S)
        elif self._has_new_load():
            self._wake_at(self._load_at + LOAD_S)

    def on_lost(self) -> None:
        self._changes.clear()
        self._stop_timer()
        for subscriber in self._subscribers:
            subscriber.end()
        self._subscribers.clear()  # what the next core reports is not for them

    # ── inside ──

    def _start(self, snapshot: bytes, tiers: Mapping[str, bytes]) -> None:
        for subscriber in self._subscribers:
            if subscriber.is_live:
                continue
            subscriber.start(snapshot, tiers)
            subscriber.delta(NO_CHANGE, self._load_now(), self._adapters)
            if self._draining is not None:
                subscriber.put(frame(DRAINING, self._draining))
        self._wake_at(_now() + HEARTBEAT_S)

    def _flush(self) -> None:
        """Send what changed; a sign of life if nothing did for long."""
        self._stop_timer()
        now = _now()
        change = _merged(self._changes)
        is_due = now - self._sent_at >= HEARTBEAT_S * 0.99
        # A core that hangs is shown by silence.
        beats = is_due and self._engine.health().is_live
        load = None
        if beats or (self._has_new_load() and now - self._load_at >= LOAD_S):
            load = self._load = self._load_now()
            self._load_at = now
        if change != NO_CHANGE or load is not None:
            for subscriber in self._subscribers:
                if subscriber.is_live:
                    subscriber.delta(change, load, self._adapters)
            self._sent_at = now
        if self._changes:
            self._changes.clear()
            self._changes_at = now
        soon = self._load_at + LOAD_S if self._has_new_load() else now + HEARTBEAT_S
        self._wake_at(min(soon, max(self._sent_at, now - HEARTBEAT_S / 2) + HEARTBEAT_S))

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            if self._wakes_at <= at:
                return
            self._timer.cancel()
        # Kept here, for uvloop's timer does not know its time once that has come.
        self._wakes_at = at
        self._timer = asyncio.get_running_loop().call_at(max(at, _now()), self._flush)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note(self, stats: EngineStats) -> None:
        self._stats = stats
        step_s = stats.step_ms / 1e3
        if step_s:
            before = self._step_s or step_s
            self._step_s = before + SMOOTHING * (step_s - before)

    def _has_new_load(self) -> bool:
        """Steps differ in length all the time: that alone is not reported."""
        stats, load = self._stats, self._load
        return (
            stats.num_running != load.running
            or stats.num_waiting != load.waiting
            or stats.queued_tokens != load.queued_tokens
            or abs(_usage(stats) - load.kv_usage) > 1 / 256
        )

    def _load_now(self) -> Load:
        stats = self._stats
        return Load(
            running=stats.num_running,
            waiting=stats.num_waiting,
            queued_tokens=stats.queued_tokens,
            kv_usage=_usage(stats),
            step_s=self._step_s,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            computed_tokens=stats.prompt_tokens - stats.prompt_tokens_cached,
            is_saturated=self._admission.is_saturated,
        )


def _address(source: KVSource | None) -> str:
    return "" if source is None else join_address(source.host, source.port)


def _tiers(config: EngineConfig) -> list[str]:
    """The media beside the KV cache that this engine keeps blocks in."""
    is_used = {
        HOST_MEDIUM: bool(config.kv_offloading_size),
        DISK_MEDIUM: config.kv_disk_path is not None,
        SHARED_MEDIUM: config.kv_shared_store is not None,
    }
    return [medium for medium in TIER_MEDIA if is_used[medium]]


def _snapshot_frames(snapshot: bytes, tiers: Mapping[str, bytes]) -> Iterator[bytes]:
    parts = [("", part) for part in _parts(snapshot)]
    parts += [(medium, part) for medium, packed in tiers.items() for part in _parts(packed)]
    for number, (medium, part) in enumerate(parts, 1):
        last = number == len(parts)
        if medium:
            yield frame(SNAPSHOT, Snapshot(b"", last, {medium: part}))
        else:
            yield frame(SNAPSHOT, Snapshot(part, last))


def _parts(packed: bytes) -> Iterator[bytes]:
    for start in range(0, max(len(packed), 1), SNAPSHOT_BYTES):
        yield packed[start : start + SNAPSHOT_BYTES]


def _merged(changes: list[ResidencyChange]) -> ResidencyChange:
    """Of several changes the last word on each key: it is stored, in a tier or gone."""
    if len(changes) <= 1:
        return changes[0] if changes else NO_CHANGE
    evicted: dict[bytes, None] = {}
    stored: dict[bytes, bytes] = {}
    tiers: dict[bytes, tuple[str, bytes]] = {}
    for change in changes:
        for at in range(0, len(change.evicted), KEY_BYTES):
            key = change.evicted[at : at + KEY_BYTES]
            evicted[key] = None
            stored.pop(key, None)
            tiers.pop(key, None)
        for key, tokens in _entries(change.stored):
            evicted.pop(key, None)
            tiers.pop(key, None)
            stored[key] = tokens
        for medium, packed in change.tiers.items():
            tiers.update((key, (medium, tokens)) for key, tokens in _entries(packed))
    by_medium: dict[str, list[bytes]] = {}
    for key, (medium, tokens) in tiers.items():
        by_medium.setdefault(medium, []).append(key + tokens)
    return ResidencyChange(
        stored=b"".join([key + tokens for key, tokens in stored.items()]),
        evicted=b"".join(evicted),
        tiers={medium: b"".join(entries) for medium, entries in by_medium.items()},
    )


def _entries(packed: bytes) -> Iterator[tuple[bytes, bytes]]:
    for at in range(0, len(packed), STORED_BYTES):
        middle = at + KEY_BYTES
        yield packed[at:middle], packed[middle : at + STORED_BYTES]


def _usage(stats: EngineStats) -> float:
    return stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0


def _now() -> float:
    return asyncio.get_running_loop().time()
