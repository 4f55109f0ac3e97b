"""Slots of recurrent states: one for each row that runs, the others for snapshots of prefixes.

A sequence's state stands behind its last computed token and nowhere else, so a prefix can be gone
on with only where a snapshot was saved: at multiples of `stride` tokens from the beginning, which
do not depend on how the prompt was cut into steps. Snapshots are found by the digest of the block
that ends there; what was not used for longest gives its slot up.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from octavo_engine.caches import STATE_STRIDE
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from octavo_engine.state.sequence import Sequence


class StateSnapshots:
    """Which slots behind the rows' own hold which prefixes. Snapshots are copied to a row before a
    step, and saved in the course of one; so no sequence holds any but those it is saving."""

    def __init__(self, num_rows: int, num_snapshots: int, *, stride: int = STATE_STRIDE) -> None:
        assert stride % BLOCK_SIZE == 0, "a snapshot is named as the block that ends there"
        self.stride = stride
        self.num_snapshots = num_snapshots
        self.free = list(range(num_rows, num_rows + num_snapshots))
        self.cached: OrderedDict[bytes, int] = OrderedDict()  # the last used at the end

    def longest(self, digests: List[bytes], num_blocks: int) -> int:
        """The largest number of blocks, up to that one, behind which there is a snapshot; or 0."""
        each = self.stride // BLOCK_SIZE
        for end in range(num_blocks // each * each, 0, -each):
            if digests[end - 1] in self.cached:
                return end
        return 0

    def next_end(self, num_blocks: int) -> int:
        """The place of the first snapshot behind so many blocks."""
        each = self.stride // BLOCK_SIZE
        return (num_blocks // each + 1) * each

    def use(self, digest: bytes) -> int:
        """The slot of a snapshot that there is."""
        self.cached.move_to_end(digest)
        return self.cached[digest]

    def plan(self, sequence: Sequence, start: int, count: int) -> list[tuple[int, int]]:
        """(tokens, slot) for each snapshot that computing tokens [start, start + count) saves.

        Those of a long prompt may take each other's slots; of one step they may not.
        """
        saved = []
        first = (start // self.stride + 1) * self.stride
        for end in range(first, start + count + 1, self.stride):
            place = end // BLOCK_SIZE - 1
            if place < len(sequence.digests) and sequence.digests[place] in self.cached:
                self.cached.move_to_end(sequence.digests[place])
                continue
            slot = self._take()
            if slot is None:
                continue
            sequence.state_saves[end] = slot
            saved.append((end, slot))
        return saved

    def publish(self, sequence: Sequence) -> None:
        """Let others find what it saved of its computed tokens."""
        computed = [end for end in sequence.state_saves if end <= sequence.num_computed_tokens]
        for end in computed:
            slot = sequence.state_saves.pop(end)
            digest = sequence.digests[end // BLOCK_SIZE - 1]
            if digest in self.cached:
                self.free.append(slot)
            else:
                self.cached[digest] = slot

    def release(self, sequence: Sequence) -> None:
        """Take back the slots that it was saving to."""
        self.free += sequence.state_saves.values()
        sequence.state_saves = {}

    def retract(self, digests: List[bytes]) -> None:
        """Forget the snapshots of a text."""
        for digest in digests:
            slot = self.cached.pop(digest, None)
            if slot is not None:
                self.free.append(slot)

    def clear(self) -> None:
        self.retract(list(self.cached))

    def _take(self) -> int | None:
        if self.free:
            return self.free.pop()
        if not self.cached:
            return None  # all are being saved to
        return self.cached.popitem(last=False)[1]
