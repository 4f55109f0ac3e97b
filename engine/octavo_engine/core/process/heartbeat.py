"""The step loop's own account of its progress; another thread can read it while the loop hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


OVERDUE = 4  # times its estimate; a step is planned to take 0.8 s at most
HOPELESS = 30
FORGET = 0.999


class HeartbeatState(NamedTuple):
    """One reading."""

    steps: int
    step_age_s: float  # 0 when the loop is idle
    expected_s: float
    slowest_s: float = 0.0  # of the steps so far; slowly forgotten

    def is_stalled(self, patience_s: float) -> bool:
        """A step is overdue when it is far beyond its own estimate, never before `patience_s`."""
        return self.step_age_s > max(patience_s, OVERDUE * self.expected_s)

    @property
    def grace_s(self) -> float:
        """How much longer than any other an overdue step may go on before it is given up: a prompt
        deep in a long context takes many times its estimate, a device may compile."""
        return max(HOPELESS * self.expected_s, 2 * self.slowest_s)


class Heartbeat:
    """Written by the step loop alone; what a reader needs is one object, so there is no lock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._steps = 0
        self._slowest_s = 0.0
        self._under_way: tuple[float, float] | None = None  # started at, expected seconds

    def begin(self) -> None:
        """The loop turned to its work."""
        self._under_way = (self._now(), 0.0)

    def expect(self, seconds: float) -> None:
        """It is about to compute what should take so long."""
        if self._under_way is not None:
            self._under_way = (self._under_way[0], seconds)

    def pause(self) -> None:
        """What follows in this turn takes as long as it takes: memory is moved, files are read."""
        self._under_way = None

    def end(self) -> None:
        """The turn is done."""
        if self._under_way is not None:
            took_s = self._now() - self._under_way[0]
            self._slowest_s = max(took_s, FORGET * self._slowest_s)
        self._under_way = None
        self._steps += 1

    def pulse(self) -> HeartbeatState:
        under_way = self._under_way
        if under_way is None:
            return HeartbeatState(self._steps, 0.0, 0.0, self._slowest_s)
        started_at, expected_s = under_way
        age_s = max(0.0, self._now() - started_at)
        return HeartbeatState(self._steps, age_s, expected_s, self._slowest_s)
