"""Blocks that left the pool and lie in a tier: their labels are true still, at another price."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

IN_POOL = 0  # a place; the others are 1 + the index in protocol.kv_events.TIER_MEDIA
MAX_OUTSIDE = 1 << 18  # blocks, each of some hundred bytes here


class TierPlaces(Protocol):
    """What tiers hold, of the first group of layers."""

    def place_of(self, digest: bytes) -> int:
        """The quickest one that has the block; IN_POOL if none has."""

    def take_changed(self) -> Iterable[bytes]:
        """Blocks that came to a tier or left one since the last call."""


class OutsideBlock(NamedTuple):
    """How a block hangs together with others, as the pool knew it."""

    parent: bytes
    place: int
    is_first: bool  # with labels, and without a block before it


class OutsideBlocks:
    """A bounded record of them, with what follows what."""

    def __init__(self, max_blocks: int = MAX_OUTSIDE) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[bytes, OutsideBlock] = {}  # the one recorded first comes first
        self._children: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: object) -> bool:
        return digest in self._blocks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def get(self, digest: bytes) -> OutsideBlock | None:
        return self._blocks.get(digest)

    def children(self, digest: bytes) -> Collection[bytes]:
        return self._children.get(digest, ())

    def add(self, digest: bytes, block: OutsideBlock) -> bytes | None:
        """Record it. Returns the block to be forgotten where there are too many: of a prompt the
        pool gives up the end first, so it has the fewest behind it."""
        self._blocks[digest] = block
        self._children.setdefault(block.parent, set()).add(digest)
        return next(iter(self._blocks)) if len(self._blocks) > self._max_blocks else None

    def move(self, digest: bytes, place: int) -> None:
        self._blocks[digest] = self._blocks[digest]._replace(place=place)

    def discard(self, digest: bytes) -> OutsideBlock | None:
        block = self._blocks.pop(digest, None)
        if block is not None:
            siblings = self._children[block.parent]
            siblings.discard(digest)
            if not siblings:
                del self._children[block.parent]
        return block

    def clear(self) -> None:
        self._blocks.clear()
        self._children.clear()
