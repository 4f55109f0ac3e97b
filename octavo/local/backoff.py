"""How long to wait before what ended by itself is started again."""

from __future__ import annotations

FIRST_S = 1.0
LONGEST_S = 60.0
STEADY_S = 60.0  # who ran this long begins anew


class BackOff:
    """1, 2, 4, … seconds; times are given, not read."""

    def __init__(self) -> None:
        self._failures = 0
        self.until = float("-inf")

    def failed(self, now: float, *, ran_s: float) -> float:
        """The pause that follows, in seconds."""
        if ran_s >= STEADY_S:
            self._failures = 0
        pause_s: float = min(LONGEST_S, FIRST_S * 2 ** min(self._failures, 10))
        self._failures += 1
        self.until = now + pause_s
        return pause_s

    def is_over(self, now: float) -> bool:
        return now >= self.until
