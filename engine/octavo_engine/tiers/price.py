"""Whether loading KV blocks is quicker than computing them again. Pure."""

from __future__ import annotations

FORGET = 0.9  # weight of the past at each new measurement
ASSUMED = 0.02  # weight of what was assumed of small and large reads, beside one measurement
OUTLIER = 3.0  # a read that took so many times longer than expected is taken for that much only
WARM_UP = 3  # reads before outliers are recognised
TRY_AGAIN = 200  # refusals in a row after which an estimate may be out of date
_NOTHING = (0.0,) * 6


class TierMeter:
    """Seconds that a tier takes for some bytes: a line through its reads, with the past fading.

    Each read counts by how far the line is off in proportion to what was assumed, so that small
    reads are known as well as large ones. As long as reads were of one size, others are taken to be
    slower or quicker than assumed by as much.

    A tier that once was slow is not read, and so not measured; after many refusals it is taken for
    as quick as was assumed, once, and so read and measured.
    """

    def __init__(self, *, latency_s: float, bytes_per_s: float) -> None:
        self._assumed = latency_s, 1.0 / bytes_per_s
        self._line = self._assumed  # seconds of a read, and of each byte
        self._sums: tuple[float, ...] = _NOTHING
        self._num_reads = self._num_refused = 0
        self._was_outlier = False

    def seconds(self, num_bytes: int) -> float:
        """To read so many; nothing takes no time."""
        if not num_bytes:
            return 0.0
        known_s = self._line[0] + num_bytes * self._line[1]
        if self._num_refused < TRY_AGAIN:
            return known_s
        return min(known_s, self._assumed_s(num_bytes))

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A read of so many bytes took so long."""
        if num_bytes <= 0:
            return
        most_s = OUTLIER * (self._line[0] + num_bytes * self._line[1])
        is_outlier = self._num_reads >= WARM_UP and seconds > most_s
        if is_outlier and not self._was_outlier:  # one may be an accident, two in a row are not
            seconds = most_s
        self._was_outlier = is_outlier
        self._num_reads += 1
        self._num_refused = 0
        point = self._point(float(num_bytes), seconds, 1.0)
        self._sums = tuple(FORGET * past + now for past, now in zip(self._sums, point, strict=True))
        self._line = self._fit()

    def replace(self, num_bytes: int, seconds: float) -> None:
        """As `observe`, but what was measured before is of no worth."""
        self._sums, self._num_reads, self._was_outlier = _NOTHING, 0, False
        self.observe(num_bytes, seconds)

    def refused(self) -> None:
        """The estimate was why something was computed instead."""
        self._num_refused += 1

    def _assumed_s(self, num_bytes: float) -> float:
        return self._assumed[0] + num_bytes * self._assumed[1]

    def _point(self, x: float, y: float, weight: float) -> tuple[float, ...]:
        """The weighted sums of one read: 1, x, y, x², x·y, and how many times longer than
        assumed it took."""
        assumed_s = max(self._assumed_s(x), 1e-9)
        w = weight / assumed_s**2
        return (w, w * x, w * y, w * x * x, w * x * y, y / assumed_s)

    def _fit(self) -> tuple[float, float]:
        """The least squares line, neither part of which is below zero."""
        latency_s, byte_s = self._assumed
        num_reads = (1.0 - FORGET**self._num_reads) / (1.0 - FORGET)
        factor = self._sums[5] / num_reads
        small = self._point(0.0, factor * latency_s, ASSUMED if latency_s else 0.0)
        size = max(latency_s / byte_s, 1.0)  # of a read of which half is the latency
        middle = self._point(size, factor * self._assumed_s(size), ASSUMED)
        parts = zip(self._sums, small, middle, strict=True)
        w, x, y, xx, xy, _ = (sum(each) for each in parts)
        spread = xx * w - x * x
        slope = (xy * w - x * y) / spread if spread > 1e-9 * xx * w else xy / xx
        start = (y - slope * x) / w
        if slope < 0.0:
            return y / w, 0.0
        return (start, slope) if start >= 0.0 else (0.0, xy / xx)


def is_worth_loading(*, load_s: float, recompute_s: float) -> bool:
    """While the time of a step is unknown (0), loading is tried."""
    return recompute_s <= 0.0 or load_s < recompute_s
