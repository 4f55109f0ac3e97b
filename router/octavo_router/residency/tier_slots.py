"""Prefixes in the slower memories of one of our engines: a slot of the index for each memory.

A slot has what lies in that memory or in a quicker one. A prompt may begin in the KV cache, go on
in host memory and end on disk; so the tokens that a slot matches are those that can be had without
anything slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.kv_events import DISK_MEDIUM, HOST_MEDIUM

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
# computing from host memory, and five times from a local disk.
SAVED_PERCENT: Final[Mapping[str, int]] = {HOST_MEDIUM: 90, DISK_MEDIUM: 80}


class TierSlots:
    """Media that have no price here are those of a newer engine: they are left out."""

    def __init__(self, index: Slots, media: Sequence[str]) -> None:
        self._index = index
        self.media = [medium for medium in SAVED_PERCENT if medium in media]  # the quickest first
        self.slots = [index.add_slot() for _ in self.media]

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
        for slot in self.slots:
            self._index.clear(slot)

    def close(self) -> None:
        """The slots are others' from now on."""
        for slot in self.slots:
            self._index.drop_slot(slot)
        self.slots, self.media = [], []

    def saved_tokens(self, matched_tokens: int, found: Sequence[int]) -> int:
        """The tokens saved where the KV cache has `matched_tokens` of a prompt, and each of the
        slots as many as `found` says."""
        saved = reached = matched_tokens
        for medium, tokens in zip(self.media, found, strict=True):
            if tokens > reached:
                saved += (tokens - reached) * SAVED_PERCENT[medium] // 100
                reached = tokens
        return saved
