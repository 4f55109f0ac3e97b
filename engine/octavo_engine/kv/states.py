"""Slots of recurrent states: one for each row that runs, the others for snapshots of prefixes.

A sequence's state stands behind its last computed token and nowhere else, so a prefix can be gone
on with only where a snapshot was saved: at multiples of `stride` tokens from the beginning, and
behind the last full block of each prompt, where the next turn of a chat goes on. Neither depends on
how the prompt was cut into steps. Snapshots are found by the digest of the block that ends there;
what was not used for longest gives its slot up. One may come from outside, too.

A step with draft tokens also saves the state behind each of them that another follows. If they were
wrong from some place on, the state there is copied to the row before its next step: it goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from octavo_engine.caches import STATE_STRIDE
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as List

    from octavo_engine.state.sequence import Sequence


def prompt_end(sequence: Sequence) -> int:
    """Of the tokens of its prompt: those in full blocks before the last token, which is computed
    by whoever goes on."""
    return (sequence.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class StateSnapshots:
    """Which slots behind the rows' own hold which prefixes. Snapshots are copied to a row before a
    step, and saved in the course of one; so no sequence holds any but those it is saving or goes
    back to."""

    def __init__(self, num_rows: int, num_snapshots: int, *, stride: int = STATE_STRIDE) -> None:
        assert stride % BLOCK_SIZE == 0, "a snapshot is named as the block that ends there"
        self.stride = stride
        self.num_snapshots = num_snapshots
        self.free = list(range(num_rows, num_rows + num_snapshots))
        self.cached: OrderedDict[bytes, int] = OrderedDict()  # the last used at the end

    def longest(
        self,
        digests: List[bytes],
        num_blocks: int,
        is_outside: Callable[[bytes], bool] = lambda digest: False,
    ) -> int:
        """The largest number of blocks, up to that one, behind which there is a snapshot; or 0."""
        for end in range(num_blocks, 0, -1):
            if digests[end - 1] in self.cached or is_outside(digests[end - 1]):
                return end
        return 0

    def likely_ends(self, num_blocks: int) -> list[int]:
        """The places behind which there may be one of a prompt with so many full blocks, or of one
        that goes on from there."""
        each = self.stride // BLOCK_SIZE
        ends = list(range(each, num_blocks + 1, each))
        return ends if num_blocks % each == 0 else [*ends, num_blocks]

    def is_to_come(self, owner: Sequence, end: int) -> bool:
        """Whether a sequence that computes the block at that place saves one behind it."""
        num_tokens = end * BLOCK_SIZE
        return num_tokens % self.stride == 0 or num_tokens == prompt_end(owner)

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
        ends = {*range(first, start + count + 1, self.stride)}
        if start < (last := prompt_end(sequence)) <= start + count:
            ends.add(last)
        for end in sorted(ends, reverse=True):  # where slots are scarce, the last are worth most
            place = end // BLOCK_SIZE - 1
            if place < len(sequence.digests) and sequence.digests[place] in self.cached:
                self.cached.move_to_end(sequence.digests[place])
                continue
            slot = sequence.draft_saves.pop(end, None)
            if slot is None:
                slot = self._take()
            if slot is None:
                continue
            sequence.state_saves[end] = slot
            saved.append((end, slot))
        return saved

    def reserve_drafts(self, sequence: Sequence, start: int, count: int) -> int:
        """Slots for the states that a step saves of it, behind each of tokens [start, start +
        count); returns how many there are."""
        for end in range(start + 1, start + count + 1):
            slot = self._take()
            if slot is None:
                return end - start - 1
            sequence.draft_saves[end] = slot
        return count

    def settle_drafts(self, sequence: Sequence, num_tokens: int, *, has_wrong: bool) -> None:
        """A step with drafts is done, of which those up to so many tokens were right."""
        for end in [end for end in sequence.state_saves if end > num_tokens]:
            self.free.append(sequence.state_saves.pop(end))
        for end in [end for end in sequence.draft_saves if end != num_tokens or not has_wrong]:
            self.free.append(sequence.draft_saves.pop(end))
        if has_wrong:
            sequence.rewind = num_tokens

    def take_rewind(self, sequence: Sequence) -> int:
        """The slot of the state that it goes back to, before the step that is being planned. The
        slot may be saved to in that step: copies come first."""
        end, sequence.rewind = sequence.rewind, 0
        if (slot := sequence.draft_saves.pop(end, None)) is None:
            return sequence.state_saves[end]  # a snapshot, which others find from now on
        self.free.append(slot)
        return slot

    def publish(self, sequence: Sequence) -> None:
        """Let others find what it saved of its computed tokens."""
        most = sequence.num_computed_tokens
        computed = [end for end in sequence.state_saves if end <= most and end != sequence.rewind]
        for end in sorted(computed):
            slot = sequence.state_saves.pop(end)
            digest = sequence.digests[end // BLOCK_SIZE - 1]
            if digest in self.cached:
                self.free.append(slot)
            else:
                self.cached[digest] = slot

    def release(self, sequence: Sequence) -> None:
        """Take back the slots that it was saving to."""
        self.free += sequence.state_saves.values()
        self.free += sequence.draft_saves.values()
        sequence.state_saves, sequence.draft_saves, sequence.rewind = {}, {}, 0

    def place(self, digest: bytes, load: Callable[[int], None]) -> bool:
        """Have one loaded into a slot that is not being saved to, for others to find. False without
        such a slot."""
        if digest in self.cached:
            return True
        slot = self._take()
        if slot is None:
            return False
        try:
            load(slot)
        except BaseException:
            self.free.append(slot)
            raise
        self.cached[digest] = slot
        return True

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
