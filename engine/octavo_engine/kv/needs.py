"""How many blocks a sequence takes: arithmetic over the windows of its groups of layers.

In a group without a window a sequence holds blocks for all its tokens. In a group with one it holds
those that the next tokens see, and those that a step writes; blocks behind them are given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence


class GroupNeeds(NamedTuple):
    """What a sequence holds in one group; both None where it holds everything."""

    behind: int | None  # blocks that are seen before the one where the next token goes
    most: int | None  # blocks that are held at a time, a step's tokens among them

    def first(self, num_computed_tokens: int) -> int:
        """The first place of the block table that is still needed."""
        if self.behind is None:
            return 0
        return max(0, num_computed_tokens // BLOCK_SIZE - self.behind)

    def blocks(self, num_blocks: int) -> int:
        """The most that are held at a time by a sequence that fills so many."""
        return num_blocks if self.most is None else min(num_blocks, self.most)

    def promised(self, num_held: int, num_to_come: int) -> int:
        """Blocks that must stay free for one that holds so many and will fill so many more."""
        return 0 if self.most is None else max(0, min(self.most - num_held, num_to_come))


class KVNeeds:
    """Of all groups. `max_step_tokens`: that one sequence computes between two reports."""

    def __init__(self, windows: Sequence[int | None] = (None,), max_step_tokens: int = 1) -> None:
        self.groups = [_needs(window, max_step_tokens) for window in windows]
        self.num_full = sum(group.behind is None for group in self.groups)
        self.windowed = [group for group in self.groups if group.behind is not None]

    def blocks(self, num_tokens: int) -> int:
        """That a sequence of so many tokens holds at most at a time."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        return sum(group.blocks(num_blocks) for group in self.groups)

    def tokens(self, num_blocks: int, limit: int) -> int:
        """Of the longest sequence for which that is enough; no more than `limit` where windows make
        it endless."""
        if not self.windowed:
            return num_blocks // self.num_full * BLOCK_SIZE
        low, high = 0, -(-limit // BLOCK_SIZE)
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks(middle * BLOCK_SIZE) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return min(low * BLOCK_SIZE, limit)

    def growth(self, num_tokens: int, more: float) -> float:
        """Blocks that a sequence of so many tokens adds with so many more."""
        blocks = self.num_full * more / BLOCK_SIZE
        for group in self.windowed:
            assert group.behind is not None
            room = group.behind + 1 - num_tokens / BLOCK_SIZE
            blocks += min(max(room, 0.0), more / BLOCK_SIZE)
        return blocks


def _needs(window: int | None, max_step_tokens: int) -> GroupNeeds:
    if window is None:
        return GroupNeeds(None, None)
    behind = -(-(window - 1) // BLOCK_SIZE)
    # The step's tokens may begin anywhere in a block.
    return GroupNeeds(behind, behind + -(-(max_step_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE))
