"""The step loop's own account of its progress; another thread can read it while the loop hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Pulse(NamedTuple):
    """One reading."""

    steps: int
    step_age_s: float  # 0 when the loop is idle
    expected_s: float

    def is_stalled(self, patience_s: float) -> bool:
        """A step is overdue when it is far beyond its own estimate, never before `patience_s`."""
        return self.step_age_s > max(patience_s, 10 * self.expected_s)


class Heartbeat:
    """Written by the step loop alone; what a reader needs is one object, so there is no lock.

    The estimate is the slowest time per token of late, times the tokens of the step at hand. It
    forgets slowly, so that one quick step does not make the next long prompt look like a hang.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._steps = 0
        self._under_way: tuple[float, float] | None = None  # started at, expected seconds
        self._seconds_per_token = 0.0

    def begin(self) -> None:
        """The loop turned to its work."""
        self._under_way = (self._now(), 0.0)

    def expect(self, num_tokens: int) -> None:
        """It is about to compute so many tokens."""
        if self._under_way is not None:
            self._under_way = (self._under_way[0], self._seconds_per_token * num_tokens)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """They took so long."""
        self._seconds_per_token = max(seconds / max(num_tokens, 1), 0.99 * self._seconds_per_token)

    def pause(self) -> None:
        """What follows in this turn takes as long as it takes: memory is moved, files are read."""
        self._under_way = None

    def end(self) -> None:
        """The turn is done."""
        self._under_way = None
        self._steps += 1

    def pulse(self) -> Pulse:
        under_way = self._under_way
        if under_way is None:
            return Pulse(self._steps, 0.0, 0.0)
        started_at, expected_s = under_way
        return Pulse(self._steps, max(0.0, self._now() - started_at), expected_s)
