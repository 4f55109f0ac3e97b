"""How often each adapter is requested: requests a second over a window that decays."""

from __future__ import annotations

import math

HALF_LIFE_S = 30.0
FORGOTTEN = 1e-3  # requests of weight left, below which an adapter is not remembered
_DECAY = math.log(2.0) / HALF_LIFE_S
_NONE = (0.0, 0.0)


class AdapterDemand:
    """An exponential average by name. Times are of one clock."""

    __slots__ = ("_total", "_weights")

    def __init__(self) -> None:
        self._weights: dict[str, tuple[float, float]] = {}  # decayed requests, as of when
        self._total = (0.0, 0.0)

    def note(self, name: str, now: float) -> None:
        """One request."""
        self._weights[name] = (_decayed(self._weights.get(name, _NONE), now) + 1.0, now)
        self._total = (_decayed(self._total, now) + 1.0, now)

    def rate(self, name: str, now: float) -> float:
        """Requests a second."""
        return _decayed(self._weights.get(name, _NONE), now) * _DECAY

    def total_rate(self, now: float) -> float:
        """Requests a second for all adapters."""
        return _decayed(self._total, now) * _DECAY

    def forget_old(self, now: float) -> None:
        """Bounds memory: names that nobody has requested in a long time."""
        for name in [n for n, one in self._weights.items() if _decayed(one, now) < FORGOTTEN]:
            del self._weights[name]


def _decayed(weight: tuple[float, float], now: float) -> float:
    value, at = weight
    return value * math.exp(_DECAY * (at - now))
