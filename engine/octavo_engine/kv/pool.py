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
    Retained blocks are free without being in line for that.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.caches = [PrefixCache() for _ in range(num_groups)]
        self.cache = self.caches[0]
        self._free, self._retained = FreeBlockQueue(), FreeBlockQueue()
        for block in self.blocks:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        """Blocks without an owner, cached ones among them."""
        return len(self._free) + len(self._retained)

    @property
    def num_allocatable(self) -> int:
        """Free blocks that are not retained."""
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
                self._queue_of(block).remove(block)
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
                self._queue_of(block).append(block)
            else:
                self._free.append_left(block)  # nothing in it that could be hit: reuse it first

    def retain(self, block: Block) -> None:
        """From now on it is not reused, also while it is free."""
        if block.ref_count == 0:
            self._free.remove(block)
            self._retained.append(block)
        block.is_retained = True

    def end_retention(self, block: Block) -> None:
        """It may be reused again, as if it had been freed now."""
        block.is_retained = False
        if block.ref_count:
            return
        self._retained.remove(block)
        if block.parent is not None:
            self._free.append(block)
        else:
            self._free.append_left(block)

    def free_blocks(self) -> list[Block]:
        """The free blocks in the order in which they would be reused, retained ones at the end.
        For checks and tests."""
        return [*self._free, *self._retained]

    def _queue_of(self, block: Block) -> FreeBlockQueue:
        return self._retained if block.is_retained else self._free
