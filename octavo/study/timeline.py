"""Virtual time: what is due happens in order, at once, and time is what the next event says."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Timeline:
    """Events of one moment happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0

    def clock(self) -> float:
        """`now`, for those who want a function."""
        return self.now

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have it happen then; now if that is past."""
        self._num_planned += 1
        heapq.heappush(self._events, (max(when, self.now), self._num_planned, event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now + delay_s, event)

    def run(self, *, is_over: Callable[[], bool]) -> None:
        """Until it is over, or nothing is left to happen."""
        while self._events and not is_over():
            self.now, _, event = heapq.heappop(self._events)
            event()
