"""Readiness that flaps: believed at once when it goes, only after a while when it comes back again.

The first "ready" of a pod counts at once. Every flip to "not ready" does too. A pod that flipped
often lately has to stay ready for a moment before it gets requests again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_S = 10.0
MAX_FLIPS = 2  # in the window; one restart of a container is two
HOLD_S = 1.0


@dataclass(slots=True)
class _History:
    is_ready: bool
    since: float
    flips: list[float] = field(default_factory=list)


class Steadiness:
    """By pod UID. `settle` for each look at a pod; `keep` forgets those that are gone."""

    def __init__(self) -> None:
        self._histories: dict[str, _History] = {}
        self.look_again_at: float | None = None  # when somebody held back may be ready

    def begin(self) -> None:
        self.look_again_at = None

    def settle(self, uid: str, *, is_ready: bool, now: float) -> bool:
        history = self._histories.get(uid)
        if history is None:
            self._histories[uid] = _History(is_ready, now)
            return is_ready
        if history.is_ready != is_ready:
            history.is_ready, history.since = is_ready, now
            history.flips.append(now)
        history.flips = [at for at in history.flips if at > now - WINDOW_S]
        if not is_ready:
            return False
        steady_at = history.since + HOLD_S
        if len(history.flips) <= MAX_FLIPS or now >= steady_at:
            return True
        self.look_again_at = min(self.look_again_at or steady_at, steady_at)
        return False

    def keep(self, uids: set[str]) -> None:
        for gone in self._histories.keys() - uids:
            del self._histories[gone]
