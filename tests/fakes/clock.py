"""A clock that moves only when a test moves it."""

from __future__ import annotations


class ManualClock:
    """Stands in for time.monotonic."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.now += seconds
