"""Label values from outside, capped: the ten-thousandth name is counted as "other"."""

from __future__ import annotations

OTHER = "other"


class LabelSet:
    """Remembers the first `limit` values that it is given, for good."""

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value
