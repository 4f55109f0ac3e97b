"""Token buckets: so much at once, so much a second."""

from __future__ import annotations


class Bucket:
    """Fills at `rate_per_s` up to `capacity`. May go into debt: what was used is known late."""

    __slots__ = ("_at", "_level", "capacity", "rate_per_s")

    def __init__(self, rate_per_s: float, capacity: float, now: float) -> None:
        assert rate_per_s > 0.0
        assert capacity > 0.0
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self._level = capacity
        self._at = now

    def level(self, now: float) -> float:
        if now > self._at:
            grown = self._level + (now - self._at) * self.rate_per_s
            self._level = min(self.capacity, grown)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """0 if `amount` may be taken now. More than fits may be taken when it is full."""
        missing = min(amount, self.capacity) - self.level(now)
        return max(0.0, missing / self.rate_per_s)

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def give_back(self, amount: float, now: float) -> None:
        """A negative amount takes more."""
        self._level = min(self.capacity, self.level(now) + amount)
