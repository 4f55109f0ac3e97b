"""Whether the wall clock was set: seen against the clock that only goes forward.

Nothing here waits by the wall clock, so a jump ends nothing early. But times that others are given
are wrong from then on, or were wrong until then, and certificates and signatures are judged by it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

JUMP_S: Final = 2.0  # far more than clocks are slewed by between two looks
SHOWN_S: Final = 300.0
_BETWEEN_S: Final = 0.5


class ClockWatch:
    """Call `look` about once a second."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_jumps = 0
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s: float | None = None  # of the wall clock, at the last look
        self._last: tuple[float, float] | None = None  # when the latest was seen, and its size

    def look(self) -> float:
        """By how much the clock was set since the last look; 0 where it was not."""
        before = self._monotonic()
        wall = self._wall()
        now = self._monotonic()
        if now - before > _BETWEEN_S:  # stopped in between: the two do not belong together
            return 0.0
        offset_s, self._offset_s = self._offset_s, wall - now
        jump_s = 0.0 if offset_s is None else self._offset_s - offset_s
        if abs(jump_s) < JUMP_S:
            return 0.0
        self.num_jumps += 1
        self._last = (now, jump_s)
        return jump_s

    @property
    def recent_s(self) -> float:
        """The latest jump, for some minutes; 0 where there was none."""
        if self._last is None or self._monotonic() - self._last[0] > SHOWN_S:
            return 0.0
        return self._last[1]
