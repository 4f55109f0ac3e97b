"""Pauses that work ends early. The tick of all deadlines looks at them: no task wakes for that."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from octavo_router.http.deadlines import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.http.deadlines import DeadlineTick


async def pause(
    deadlines: DeadlineTick,
    *,
    rounds: int,
    next_round_s: Callable[[], float],
    is_over: Callable[[], bool],
) -> None:
    """Waits for so many rounds, or until the end of one finds that it is over."""
    waiting = _Pause(rounds, next_round_s, is_over)
    deadlines.watch(waiting)
    try:
        await waiting.ended
    finally:
        deadlines.forget(waiting)


class _Pause:
    __slots__ = ("_is_over", "_next_round_s", "_num_left", "deadline", "ended")

    def __init__(
        self, rounds: int, next_round_s: Callable[[], float], is_over: Callable[[], bool]
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deadline = time.monotonic() + next_round_s()
        self._next_round_s = next_round_s
        self._num_left = rounds
        self._is_over = is_over

    def on_deadline(self, now: float) -> None:
        self._num_left -= 1
        if self._num_left > 0 and not self._is_over():
            self.deadline = now + self._next_round_s()
            return
        self.deadline = NEVER
        if not self.ended.done():  # it may have been cancelled in this turn of the loop
            self.ended.set_result(None)
