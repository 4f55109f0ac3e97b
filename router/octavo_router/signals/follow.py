"""One engine's story, frame by frame: hello, snapshot, deltas into the endpoint and the index.

Pure but for what it writes. Whatever does not follow from the frame before (a gap, a repeat, a
frame of an earlier life) ends the stream with `Unreachable`: the index is cleared and the next
stream reports everything again. So an index is never wrong for longer than a reconnect takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.protocol.state import ModelState
from octavo_engine.protocol.stream import Delta, Draining, Hello, Snapshot
from octavo_router.errors import Unreachable
from octavo_router.residency.tier_slots import SharedSlots, TierSlots

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.metrics import SignalCounts
    from octavo_router.signals.frames import Frame
    from octavo_router.signals.interfaces import ResidencySink, StateSink


class StreamBroken(Unreachable):
    """The stream reported something that does not follow. `kind` is a label for counting."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Stranger(Unreachable):
    """Another pod answers at this address; nothing may be sent there."""


class Follower:
    """Takes the frames of one endpoint, over any number of streams."""

    def __init__(
        self,
        endpoint: Endpoint,
        index: ResidencySink,
        *,
        counts: SignalCounts,
        set_state: StateSink,
        on_changed: Callable[[Endpoint], None],
        now: Callable[[], float],
        shared: SharedSlots | None = None,
    ) -> None:
        """`shared`: of the stores that engines share."""
        self._endpoint = endpoint
        self._index, self._shared = index, shared or SharedSlots(index)
        self._counts = counts
        self._set_state = set_state
        self._on_changed = on_changed
        self._now = now
        self._hello: Hello | None = None
        self._is_whole = False  # the snapshot is complete
        self._is_draining = False
        self._seq: int | None = None
        self.last_frame_at: float | None = None

    @property
    def is_whole(self) -> bool:
        return self._is_whole

    def begin(self) -> None:
        """A new stream: what it reports is whole, so nothing of the last one is needed."""
        self._hello = None
        self._is_whole = False
        self._is_draining = False
        self._seq = None
        self.last_frame_at = self._now()

    def forget(self) -> None:
        """The keys are void; names and load stay until the next report."""
        if self._endpoint.slot >= 0:
            self._index.clear(self._endpoint.slot)
            if self._endpoint.tiers is not None:
                self._endpoint.tiers.clear()

    def take(self, frame: Frame) -> None:
        """Raises `StreamBroken` or `Stranger` when this stream must end."""
        self.last_frame_at = self._now()
        if self._endpoint.slot < 0:
            raise StreamBroken("removed", "the endpoint is gone")
        match frame:
            case Delta():
                self._delta(frame)
            case Snapshot():
                self._snapshot(frame)
            case Hello():
                self._greet(frame)
            case Draining():
                self._counts.draining += 1
                self._is_draining = True
                self._set_state(self._endpoint, "draining", "the engine is draining")

    def _greet(self, hello: Hello) -> None:
        self._counts.hellos += 1
        if self._hello is not None:
            raise StreamBroken("second_hello", "the engine sent a second hello")
        endpoint, spec = self._endpoint, self._endpoint.spec
        if spec.pod_uid and hello.pod_uid and spec.pod_uid != hello.pod_uid:
            self.forget()
            raise Stranger(f"pod {hello.pod_uid} answers at {spec.address.authority}")
        self._hello = hello
        self.forget()
        self._use_tiers(hello.tiers, hello.kv_store)
        before = _profile(endpoint)
        endpoint.kind = "octavo"
        endpoint.epoch = hello.epoch
        endpoint.names = spec.names or tuple(hello.names)
        endpoint.adapters = frozenset(hello.adapters)
        endpoint.adapter_digests = hello.adapter_digests
        endpoint.max_model_len = hello.max_model_len
        endpoint.vocab_size = hello.vocab_size
        endpoint.kv_role = hello.kv_role
        endpoint.kv_address, endpoint.kv_follows = hello.kv_address, hello.kv_follows
        endpoint.max_num_seqs = hello.max_num_seqs
        endpoint.model = ModelState(hello.model, hello.architecture, hello.format)
        if _profile(endpoint) != before:
            self._on_changed(endpoint)

    def _snapshot(self, snapshot: Snapshot) -> None:
        self._counts.snapshots += 1
        if self._hello is None or self._is_whole:
            raise StreamBroken("order", "a snapshot came out of order")
        self._apply(snapshot.stored, b"", snapshot.tiers)
        if snapshot.last:
            self._is_whole = True
            if not self._is_draining:
                self._set_state(self._endpoint, "ready", "")

    def _delta(self, delta: Delta) -> None:
        # Hot path: one a few milliseconds from each busy engine.
        self._counts.deltas += 1
        if not self._is_whole:
            raise StreamBroken("order", "a delta came before the snapshot's end")
        seq = self._seq
        if seq is not None and delta.seq != seq + 1:
            kind = "repeat" if delta.seq <= seq else "gap"
            raise StreamBroken(kind, f"delta {delta.seq} came after {seq}")
        self._seq = delta.seq
        endpoint = self._endpoint
        if delta.stored or delta.evicted or delta.tiers:
            self._counts.stored_bytes += len(delta.stored)
            self._counts.evicted_bytes += len(delta.evicted)
            self._apply(delta.stored, delta.evicted, delta.tiers)
        if delta.load is not None:
            if not 0.0 <= delta.load.kv_usage <= 1.0:  # false for NaN as well
                raise StreamBroken(
                    "load", f"the engine reported a KV usage of {delta.load.kv_usage}"
                )
            endpoint.load = delta.load
        if delta.adapters is not None:
            self._take_adapters(frozenset(delta.adapters), delta.adapter_digests)
        endpoint.load_at = self.last_frame_at

    def _use_tiers(self, media: list[str], store: str) -> None:
        """Slots for the memories that it reports on; before its snapshot."""
        endpoint, before = self._endpoint, self._endpoint.tiers
        endpoint.tiers = None
        if media:
            endpoint.tiers = TierSlots(self._index, media, store=store, shared=self._shared)
        if before is not None:  # now: a store that was its own until here is held once at least
            before.close()

    def _apply(self, stored: bytes, evicted: bytes, tiers: dict[str, bytes]) -> None:
        endpoint = self._endpoint
        if stored or evicted:
            self._index.apply(endpoint.slot, stored, evicted)
        if endpoint.tiers is not None:
            endpoint.tiers.apply(stored, evicted, tiers)

    def _take_adapters(self, adapters: frozenset[str], digests: dict[str, str]) -> None:
        endpoint = self._endpoint
        if (adapters, digests) != (endpoint.adapters, endpoint.adapter_digests):
            endpoint.lose_adapters(endpoint.adapters - adapters)
            endpoint.adapters, endpoint.adapter_digests = adapters, digests
            self._on_changed(endpoint)


def _profile(endpoint: Endpoint) -> tuple[object, ...]:
    """What requests are matched against, apart from state."""
    return (
        endpoint.kind,
        endpoint.kv_role,
        endpoint.kv_address,
        endpoint.kv_follows,
        endpoint.names,
        endpoint.adapters,
        endpoint.adapter_digests,
        endpoint.max_model_len,
        endpoint.max_num_seqs,
    )
