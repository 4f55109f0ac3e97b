"""Counts by bucket, real histograms: one bisection and two additions for each observation."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Fine where a token or a pick lies, coarse where only "too long" matters.
LATENCY_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 15.0,
    30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
PICK_BUCKETS = (
    0.000002, 0.000005, 0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005,
    0.01, 0.1,
)  # fmt: skip
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
SIZE_BUCKETS = tuple(4.0**power for power in range(3, 14))  # 64 B .. 64 MiB
ERROR_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384)  # tokens; a block is 16


def tally(bounds: tuple[float, ...], values: list[float], counts: list[int], /) -> float:
    """Adds each value to its bucket; returns their sum. Compiled twin: csrc/router/tally.cpp."""
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return sum(values)


try:
    from octavo_router._fast import tally as _tally
except ImportError:  # not built
    _tally = tally


class Histogram:
    """Grows only. Belongs to the event loop."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self.counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        # Hot path: once per token for the inter-token latency.
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: list[float]) -> None:
        if values:
            self.sum += _tally(self._bounds, values, self.counts)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), as the text format wants them."""
        total, rows = 0, []
        bounds = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        for bound, count in zip(bounds, self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows
