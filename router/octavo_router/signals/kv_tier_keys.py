"""Route keys that a server holds in slower memories, by the blocks they come from.

Events of these media name blocks without their tokens, so a block counts if an event of the
device's memory said its tokens before. All others are left out: too few hits, never wrong ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

MEDIA: Final = ("CPU", "DISK", "SHARED_STORAGE")  # the quickest first
MAX_TIER_BLOCKS = 1_000_000


class KvTierKeys:
    """`held` is the quickest medium of each key; it is one dict for the life of this object."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self._keys: dict[Hashable, Sequence[int]] = {}
        self._media: dict[Hashable, set[str]] = {}
        self._copies: dict[tuple[int, str], int] = {}

    def keys_of(self, block: Hashable) -> Sequence[int] | None:
        """The keys of a block that is held; None if it is not."""
        return self._keys.get(block)

    def store(self, block: Hashable, keys: Sequence[int], medium: str) -> bool:
        """Whether there was room for it. Storing twice is storing once."""
        media = self._media.get(block)
        if media is None:
            if len(self._media) >= MAX_TIER_BLOCKS:
                return False
            media = self._media[block] = set()
            self._keys[block] = keys
        if medium not in media:
            media.add(medium)
            for key in self._keys[block]:
                self._copies[key, medium] = self._copies.get((key, medium), 0) + 1
                self._update(key)
        return True

    def remove(self, block: Hashable, medium: str) -> bool:
        """Whether it was held there."""
        media = self._media.get(block)
        if media is None or medium not in media:
            return False
        media.discard(medium)
        for key in self._keys[block]:
            copies = self._copies.pop((key, medium)) - 1
            if copies:
                self._copies[key, medium] = copies
            self._update(key)
        if not media:
            del self._media[block], self._keys[block]
        return True

    def clear(self) -> None:
        for table in (self.held, self._keys, self._media, self._copies):
            table.clear()

    def _update(self, key: int) -> None:
        for medium in MEDIA:
            if (key, medium) in self._copies:
                self.held[key] = medium
                return
        self.held.pop(key, None)
