"""The block pool: which KV blocks are free, shared or cached. Knows nothing of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.kv.block import Block, FreeBlockQueue
from octavo_engine.kv.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks, each either free (without an owner) or held by `ref_count` owners.
    They go to whichever group of layers needs one; each group has a cache of its own.

    Eviction is lazy: a freed block stays published, and can be hit, until its memory is needed.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.caches = [PrefixCache() for _ in range(num_groups)]
        self.cache = self.caches[0]
        self._free = FreeBlockQueue()
        for block in self.blocks:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones among them."""
        return len(self._free)

    def allocate(self, count: int, group: int = 0) -> list[Block]:
        """Take `count` blocks for a group, each counted once. The caller has seen that so many are
        free."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = []
        for _ in range(count):
            block = self._free.pop_left()
            if block.parent is not None:
                self.caches[block.group].retract(block)
            block.group = group
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Count one more owner of each, taking free ones out of the queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Count one owner less of each, in this order. Pass a sequence's blocks last one first: the
        end of a prefix is the least likely to be shared and should be reused before its
        beginning."""
        for block in blocks:
            assert block.ref_count > 0, f"{block} freed twice"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.parent is not None:
                self._free.append(block)
            else:
                self._free.append_left(block)  # nothing in it that could be hit: reuse it first

    def free_blocks(self) -> list[Block]:
        """The free blocks in the order in which they would be reused. For checks and tests."""
        return list(self._free)
