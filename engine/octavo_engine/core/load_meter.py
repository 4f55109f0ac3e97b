"""Bytes that come in, and how fast they have lately."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo_engine.protocol.loading import LoadProgress

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW_S = 5.0  # a rate is measured over one to two of these, once there are so many
_LEAST_S = 0.5  # less says nothing


class LoadMeter:
    """`note` may be called from the thread that does the work, `read` from any other."""

    def __init__(self, phase: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._phase = phase
        self._clock = clock
        self._progress: LoadProgress | None = None
        self._mark = self._next_mark = (0.0, 0)  # when, how many bytes

    def note(self, done: int, total: int) -> None:
        now = self._clock()
        if (
            self._progress is None or done < self._progress.bytes_done
        ):  # what was there before is no speed
            self._mark = self._next_mark = (now, done)
        elif now - self._next_mark[0] >= _WINDOW_S:
            self._mark, self._next_mark = self._next_mark, (now, done)
        since_s = now - self._mark[0]
        rate = int((done - self._mark[1]) / since_s) if since_s >= _LEAST_S else 0
        self._progress = LoadProgress(self._phase, done, total, rate)

    def read(self) -> LoadProgress | None:
        """None while nothing was noted."""
        return self._progress
