"""Prefixes in the slower memories of one of our engines: a slot of the index for each memory.

A slot has what lies in that memory or in a quicker one. A prompt may begin in the KV cache, go on
in host memory and end on disk; so the tokens that a slot matches are those that can be had without
anything slower.

What one engine holds, all that share its store can read from there: their slot for that is one, and
stays for as long as one of them is known. An engine stores what it computes, and gives up a prefix
when its store has lost it too; so the slot follows what each of them reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.kv_events import DISK_MEDIUM, HOST_MEDIUM, SHARED_MEDIUM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    class Slots(Protocol):
        """The part of ResidencyIndex that is needed here."""

        def add_slot(self) -> int: ...
        def drop_slot(self, slot: int, /) -> None: ...
        def apply(self, slot: int, stored: bytes, evicted: bytes, /) -> None: ...
        def clear(self, slot: int, /) -> None: ...


# The percentage of its tokens that a hit saves. Estimates: reading is about ten times faster than
# computing from host memory, five times from a local disk, and three times from a shared store.
SAVED_PERCENT: Final[Mapping[str, int]] = {HOST_MEDIUM: 90, DISK_MEDIUM: 80, SHARED_MEDIUM: 65}


class SharedSlots:
    """A slot of the index for each store that engines share, while one of them holds it."""

    def __init__(self, index: Slots) -> None:
        self._index = index
        self._slots: dict[str, tuple[int, int]] = {}  # by store: the slot, and who holds it

    def hold(self, store: str) -> int:
        slot, holders = self._slots.get(store) or (self._index.add_slot(), 0)
        self._slots[store] = slot, holders + 1
        return slot

    def release(self, store: str) -> None:
        slot, holders = self._slots.pop(store)
        if holders > 1:
            self._slots[store] = slot, holders - 1
        else:
            self._index.drop_slot(slot)


class TierSlots:
    """Media that have no price here are those of a newer engine: they are left out."""

    def __init__(
        self,
        index: Slots,
        media: Sequence[str],
        *,
        store: str = "",
        shared: SharedSlots | None = None,
    ) -> None:
        """`store`: the id of the one that it shares with others; they are found in `shared`."""
        self._index, self._store, self._shared = index, store, None
        self.media = [medium for medium in SAVED_PERCENT if medium in media]  # the quickest first
        if store and shared is not None and SHARED_MEDIUM in self.media:
            self._shared = shared
        self.slots = [
            index.add_slot() if medium != SHARED_MEDIUM or self._shared is None
            else self._shared.hold(store)
            for medium in self.media
        ]  # fmt: skip

    def apply(self, stored: bytes, evicted: bytes, tiers: Mapping[str, bytes]) -> None:
        """A change in the packing of protocol.stream."""
        if stored or evicted:
            for slot in self.slots:
                self._index.apply(slot, stored, evicted)
        for medium, entries in tiers.items():
            if medium in self.media:
                for slot in self.slots[self.media.index(medium) :]:
                    self._index.apply(slot, entries, b"")

    def clear(self) -> None:
        """What a store holds that others share is still there."""
        for slot in self._own_slots():
            self._index.clear(slot)

    def close(self) -> None:
        """The slots are others' from now on."""
        for slot in self._own_slots():
            self._index.drop_slot(slot)
        if self._shared is not None:
            self._shared.release(self._store)
            self._shared = None
        self.slots, self.media = [], []

    def _own_slots(self) -> list[int]:
        return self.slots if self._shared is None else self.slots[: self.media.index(SHARED_MEDIUM)]

    def saved_tokens(self, matched_tokens: int, found: Sequence[int]) -> int:
        """The tokens saved where the KV cache has `matched_tokens` of a prompt, and each of the
        slots as many as `found` says."""
        saved = reached = matched_tokens
        for medium, tokens in zip(self.media, found, strict=True):
            if tokens > reached:
                saved += (tokens - reached) * SAVED_PERCENT[medium] // 100
                reached = tokens
        return saved
