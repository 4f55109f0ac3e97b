"""A blocked event loop is written down while it lasts, and liveness knows."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import TYPE_CHECKING

from octavo_operator.health import OperatorHealth
from octavo_operator.loop_watch import MAX_LAG_S, LoopWatch

if TYPE_CHECKING:
    from collections.abc import Callable


def block(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        pass


def test_a_blocked_loop_is_logged_with_its_stack():
    with tempfile.TemporaryFile("w+") as out:

        async def story() -> None:
            async with LoopWatch("test", stall_s=0.1, tick_s=0.02, out=out):
                block(20.0, until=lambda: os.fstat(out.fileno()).st_size > 0)
                block(0.1)  # it goes on, and is not written down again
                await asyncio.sleep(0)

        asyncio.run(story())
        out.seek(0)
        text = out.read()
    assert text.count("in block") == 1  # once per stall


def test_a_loop_that_runs_is_not_late_and_one_that_ended_neither():
    async def story() -> LoopWatch:
        async with LoopWatch("test") as watch:
            assert watch.lag_s == 0.0
        return watch

    assert asyncio.run(story()).lag_s == 0.0


def test_the_lag_grows_while_it_lasts_and_is_over_when_the_loop_runs_again():
    async def story() -> tuple[float, float]:
        async with LoopWatch("test", stall_s=9.0, tick_s=0.01) as watch:
            block(0.2)
            late_s = watch.lag_s
            while (after_s := watch.lag_s) > 0.05:  # noqa: ASYNC110  # it is the loop that is looked at
                await asyncio.sleep(0)
            return late_s, after_s

    late_s, after_s = asyncio.run(story())
    assert late_s >= 0.18
    assert after_s <= 0.05


def test_liveness_fails_at_twenty_seconds():
    def is_alive(lag_s: float) -> bool:
        look = OperatorHealth(1.0, 100.0, True, True, loop_lag_s=lag_s, max_loop_lag_s=MAX_LAG_S)
        return look.is_alive

    assert is_alive(19.9)
    assert not is_alive(20.1)
