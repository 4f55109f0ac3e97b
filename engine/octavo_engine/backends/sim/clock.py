"""The time that simulated steps take: real, or moved forward by the simulation itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the simulator gets its time from."""

    def now(self) -> float:
        """Monotonic seconds."""

    def sleep(self, seconds: float) -> None:
        """Return when so much time has passed on this clock."""


class RealClock:
    """The wall's pace. Sleeping costs no CPU, so dozens of simulators fit on one core."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0.0:
            time.sleep(seconds)


class VirtualClock:
    """Sleeping moves it, and nothing else does: runs are instant and the same every time.

    Give its `now` to the scheduler too, so that deadlines and aging live in the same time.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)
