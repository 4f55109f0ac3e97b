"""The step loop's own account of its progress; another thread can read it while the loop hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


OVERDUE = 4  # times its estimate; a step is planned to take 0.8 s at most
HOPELESS = 30
FORGET = 0.999
COMPILE_S = 600.0  # that compiling one kernel may take; beyond it counts as any other work


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
        deep in a long context takes many times its estimate."""
        return max(HOPELESS * self.expected_s, 2 * self.slowest_s)


class _Turn(NamedTuple):
    """Of the loop, under way."""

    started_at: float  # later by what was compiled since
    expected_s: float = 0.0
    compiling_since: float | None = None

    def age_s(self, now: float) -> float:
        """What was computed, not compiled."""
        if self.compiling_since is None:
            return max(0.0, now - self.started_at)
        overdue_s = now - self.compiling_since - COMPILE_S
        return max(0.0, self.compiling_since - self.started_at) + max(0.0, overdue_s)


class Heartbeat:
    """Written by the step loop alone; what a reader needs is one object, so there is no lock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._steps = 0
        self._slowest_s = 0.0
        self._under_way: _Turn | None = None

    def begin(self) -> None:
        """The loop turned to its work."""
        self._under_way = _Turn(self._now())

    def expect(self, seconds: float) -> None:
        """It is about to compute what should take so long."""
        if self._under_way is not None:
            self._under_way = self._under_way._replace(expected_s=seconds)

    def compile_begins(self) -> None:
        """A kernel that a launch needs is compiled first, which no estimate knows of."""
        turn = self._under_way
        if turn is not None and turn.compiling_since is None:
            self._under_way = turn._replace(compiling_since=self._now())

    def compile_ends(self) -> None:
        turn = self._under_way
        if turn is not None and turn.compiling_since is not None:
            took_s = self._now() - turn.compiling_since
            self._under_way = _Turn(turn.started_at + took_s, turn.expected_s)

    def pause(self) -> None:
        """What follows in this turn takes as long as it takes: memory is moved, files are read."""
        self._under_way = None

    def end(self) -> None:
        """The turn is done."""
        if self._under_way is not None:
            took_s = self._under_way.age_s(self._now())
            self._slowest_s = max(took_s, FORGET * self._slowest_s)
        self._under_way = None
        self._steps += 1

    def pulse(self) -> HeartbeatState:
        under_way = self._under_way
        if under_way is None:
            return HeartbeatState(self._steps, 0.0, 0.0, self._slowest_s)
        age_s = under_way.age_s(self._now())
        return HeartbeatState(self._steps, age_s, under_way.expected_s, self._slowest_s)
