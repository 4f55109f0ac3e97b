"""Whether loading KV blocks is quicker than computing them again. Pure."""

from __future__ import annotations

FORGET = 0.8  # weight of the past at each new measurement
AGE = 0.98  # of an estimate, each time it spoke against loading: it may be out of date


class TierMeter:
    """Seconds that a tier takes for some bytes: a latency and a bandwidth, learned from its reads.

    A tier that once was slow is not read, and so not measured; each refusal makes it look a little
    quicker, down to the assumption it began with, until it is tried again.
    """

    def __init__(self, *, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s = latency_s
        self._least_s = 1.0 / bytes_per_s  # a byte, as was assumed
        self._byte_s = self._least_s

    def seconds(self, num_bytes: int) -> float:
        """To read so many; nothing takes no time."""
        return self._latency_s + num_bytes * self._byte_s if num_bytes else 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A read of so many bytes took so long."""
        if num_bytes <= 0:
            return
        byte_s = max(0.0, seconds - self._latency_s) / num_bytes
        self._byte_s = FORGET * self._byte_s + (1.0 - FORGET) * byte_s

    def replace(self, num_bytes: int, seconds: float) -> None:
        """As `observe`, but what was known or assumed before is of no worth."""
        self._byte_s = max(0.0, seconds - self._latency_s) / num_bytes

    def refused(self) -> None:
        """The estimate was why something was computed instead."""
        self._byte_s = max(min(self._byte_s, self._least_s), AGE * self._byte_s)


def is_worth_loading(*, load_s: float, recompute_s: float) -> bool:
    """While the time of a step is unknown (0), loading is tried."""
    return recompute_s <= 0.0 or load_s < recompute_s
