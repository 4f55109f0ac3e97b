"""How often experts were chosen where each stage counts those of its own layers."""

from __future__ import annotations

import threading
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.executor.messages import ExpertCounts


class StageCounts:
    """What the other ranks of `size` have counted. One thread puts, another one reads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._by_rank: dict[int, ExpertCounts] = {}

    def put(self, rank: int, counts: ExpertCounts) -> None:
        with self._changed:
            self._by_rank[rank] = counts
            self._changed.notify_all()

    @property
    def are_complete(self) -> bool:
        """Whether each rank has reported once."""
        return len(self._by_rank) == self._size - 1

    def arrived(self, number: int, timeout_s: float) -> bool:
        """Whether all ranks have answered the question of that number; waits so long at most."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self.are_complete
                    and all(counts.number >= number for counts in self._by_rank.values())
                ),
                timeout_s,
            )

    def with_own(self, own: list[list[int]]) -> list[list[int]]:
        """Of all layers, with those of rank 0; a layer is of one stage."""
        with self._changed:
            parts = [own, *(counts.layers for counts in self._by_rank.values())]
        return [max(layer, key=len) for layer in zip_longest(*parts, fillvalue=[])]
