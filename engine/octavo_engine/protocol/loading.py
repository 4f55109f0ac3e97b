"""How far an engine is on its way to its first token: what it reports while it has no stream yet.

It is `loading` in the body of the 503 with which an engine that loads answers STREAM_PATH and
/ready, beside `progress`, the share alone, for clients that know nothing else. Routers pass it on
(protocol.state), the operator and local mode say it in words.
"""

from __future__ import annotations

from dataclasses import dataclass

FETCHING, LOADING = "fetching", "loading"
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_MAX_BYTES = 2**53  # what a double, and with it any JSON, holds exactly
_MAX_S = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of the weights: while fetching, that are on this disk; while loading, in memory."""

    phase: str  # fetching | loading
    bytes_done: int = 0
    bytes_total: int = 0  # 0: not known yet
    bytes_per_s: int = 0  # 0: not known yet

    @property
    def share(self) -> float | None:
        """From 0 to 1; None while the whole is not known."""
        return min(1.0, self.bytes_done / self.bytes_total) if self.bytes_total else None

    @property
    def remaining_s(self) -> int | None:
        """At the present rate, in whole seconds, rounded up."""
        if not self.bytes_total or not self.bytes_per_s:
            return None
        left = max(0, self.bytes_total - self.bytes_done)
        return min(-(-left // self.bytes_per_s), _MAX_S)

    def __str__(self) -> str:
        """Such as: loading weights: 1.2 of 3.9 GiB at 412 MiB/s, 7 s left."""
        text = f"{self.phase} weights"
        if self.bytes_total:
            text += f": {amount(self.bytes_done, self.bytes_total)}"
        elif self.bytes_done:
            text += f": {size(self.bytes_done)}"
        if self.bytes_per_s:
            text += f" at {size(self.bytes_per_s)}/s"
        if self.remaining_s:
            text += f", {self.remaining_s} s left"
        return text


def read_progress(body: object) -> LoadProgress | None:
    """From a decoded body, which may hold anything; None where it says nothing."""
    if not isinstance(body, dict) or body.get("phase") not in (FETCHING, LOADING):
        return None
    counts = [_count(body.get(name)) for name in ("bytes_done", "bytes_total", "bytes_per_s")]
    return LoadProgress(body["phase"], *counts)


def amount(done: int, total: int) -> str:
    """Both in the unit of the whole: 1.2 of 3.9 GiB."""
    name, unit = _unit(total)
    return f"{done / unit:.1f} of {total / unit:.1f} {name}"


def size(num_bytes: int) -> str:
    name, unit = _unit(num_bytes)
    return f"{num_bytes / unit:.1f} {name}"


def _unit(num_bytes: int) -> tuple[str, int]:
    return next((each for each in _UNITS if num_bytes >= each[1]), _UNITS[-1])


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        return 0
    return min(int(value), _MAX_BYTES)
