"""When a core counts as hung, and when it is started again. Times come in, judgements go out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.core.process.heartbeat import HeartbeatState


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, all of them. A hang shows within `ping + patience + ping / 2`, under five."""

    ping: float = 1.0  # between pings
    patience: float = 3.0  # for a pong, and the least for a step
    loading_patience: float = 60.0  # for a pong while the weights are packed
    kill_after: float = 10.0  # of being stalled; more where steps are known to take long
    stop: float = 5.0  # for a core to end after a stop command
    first_delay: float = 1.0  # before the first restart; doubles
    last_delay: float = 16.0
    fast_failure: float = 60.0  # a core that lived shorter failed fast
    max_fast_failures: int = 5  # in a row, then it stays dead


class HangDetector:
    """Judges one core by its pongs."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._awaited_since: float | None = None  # the oldest ping without an answer
        self._pulse: HeartbeatState | None = None
        self._stalled_since: float | None = None

    def pinged(self, now: float) -> None:
        if self._awaited_since is None:
            self._awaited_since = now

    def ponged(self, pulse: HeartbeatState) -> None:
        self._awaited_since = None
        self._pulse = pulse

    def forgive(self, now: float) -> None:
        """We slept ourselves (a suspended machine, a blocked loop): silence proves nothing."""
        if self._awaited_since is not None:
            self._awaited_since = now
        self._stalled_since = None

    def stall(self, now: float, *, loading: bool) -> str:
        """Why it counts as hung; empty if it does not."""
        patience = self._timing.loading_patience if loading else self._timing.patience
        silent_s = 0.0 if self._awaited_since is None else now - self._awaited_since
        if silent_s > patience:
            return f"the engine core has not answered for {silent_s:.1f} s"
        if self._pulse is not None and self._pulse.is_stalled(self._timing.patience):
            return f"the engine core is stuck in a step for {self._pulse.step_age_s:.1f} s"
        return ""

    def must_be_killed(self, now: float, stall: str) -> bool:
        """True once it has been stalled for long enough."""
        if not stall:
            self._stalled_since = None
            return False
        if self._stalled_since is None:
            self._stalled_since = now
        grace_s = 0.0 if self._pulse is None else self._pulse.grace_s
        return now - self._stalled_since >= self._timing.kill_after + grace_s


class Restarts:
    """Back-off between restarts, and the point at which to give up."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self.fast_failures = 0

    def failed(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        timing = self._timing
        self.fast_failures = self.fast_failures + 1 if lived_s < timing.fast_failure else 1
        if self.fast_failures >= timing.max_fast_failures:
            return None
        return min(timing.last_delay, timing.first_delay * 2.0 ** (self.fast_failures - 1))
