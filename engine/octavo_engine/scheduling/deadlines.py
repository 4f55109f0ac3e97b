"""Which sequences have run out of time."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.state.sequence import Sequence

SLACK = 64  # entries of finished sequences that may lie about before they are swept out


class Deadlines:
    """A heap of what is due when. Costs nothing while no request has a deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, at: float, *, num_live: int) -> None:
        if len(self._heap) > 2 * num_live + SLACK:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at, sequence.order[1], sequence))

    def pop_expired(self, now: float) -> list[Sequence]:
        """Unfinished sequences whose deadline is past; each is returned once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if not sequence.is_finished:
                expired.append(sequence)
        return expired
