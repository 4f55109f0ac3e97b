"""The event loop's delay is measured, and a loop that stands still is noticed from outside."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import tempfile
import threading
import time
from typing import IO, TYPE_CHECKING

from octavo_common.loop_watch import LoopWatch
from tests.fakes.facts import run, until

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("octavo.test")


def watching(
    *,
    name: str = "",
    tick_s: float = 0.001,
    stall_s: float = 1.0,
    dump_s: float = 5.0,
    on_lag: Callable[[float], None] = lambda lag_s: None,
    out: IO[str] | None = None,
) -> LoopWatch:
    return LoopWatch(
        logger, name=name, tick_s=tick_s, stall_s=stall_s, dump_s=dump_s, on_lag=on_lag, out=out
    )


def block(seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until():
        pass


def test_a_loop_that_turns_has_hardly_any_lag(caplog):
    async def story() -> None:
        lags: list[float] = []
        async with watching(on_lag=lags.append) as watch:
            await until(lambda: len(lags) >= 5)
            assert watch.lag_s < 1.0

    run(story())
    assert not caplog.records


def test_a_loop_that_stood_still_is_logged_and_its_lag_measured(caplog):
    async def story() -> None:
        lags: list[float] = []
        async with watching(name="main", stall_s=0.05, on_lag=lags.append) as watch:
            seen: list[float] = []
            release = threading.Event()

            def look_from_outside() -> None:
                while not seen or seen[-1] < 0.1:
                    seen.append(watch.lag_s)
                release.set()

            looker = threading.Thread(target=look_from_outside)
            looker.start()
            release.wait(60)  # the mistake: blocks the loop until it was seen from outside
            await until(lambda: len(caplog.records) == 1)
            looker.join()
            assert sum(lags) >= 0.1

    run(story())
    (line,) = caplog.records
    assert (line.name, line.loop, line.seconds >= 0.1) == ("octavo.test", "main", True)
    assert line.getMessage() == "The event loop stood still"


def test_a_loop_without_a_name_has_none_in_its_lines(caplog):
    async def story() -> None:
        async with watching(stall_s=0.05):
            block(0.1)
            await until(lambda: len(caplog.records) == 1)

    run(story())
    assert not hasattr(caplog.records[0], "loop")


def stands_still(seen: threading.Event) -> None:
    seen.wait(30)


def test_what_holds_it_up_is_written_down_while_it_stands(monkeypatch, tmp_path):
    """All threads' stacks, once for each stand-still: afterwards nobody could tell any more."""
    dumps = []
    seen = threading.Event()
    real = faulthandler.dump_traceback

    def dump(file, all_threads):
        real(file, all_threads)
        dumps.append(all_threads)
        seen.set()

    monkeypatch.setattr(faulthandler, "dump_traceback", dump)

    async def story() -> None:
        async with watching(stall_s=0.02, dump_s=0.1):
            stands_still(seen)

    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr(sys, "__stderr__", stderr)
        run(story())
        stderr.seek(0)
        text = stderr.read()
    assert dumps == [True]
    assert "in stands_still" in text


def test_whoever_blocks_is_on_record_with_the_stack_once_for_each_time():
    with tempfile.TemporaryFile("w+") as out:

        async def story() -> None:
            async with watching(stall_s=0.1, dump_s=0.1, tick_s=0.02, out=out):
                block(20.0, until=lambda: os.fstat(out.fileno()).st_size > 0)
                block(0.1)  # it goes on, and is not written down again
                await asyncio.sleep(0)

        asyncio.run(story())
        out.seek(0)
        text = out.read()
    assert text.count("in block") == 1


def test_a_loop_that_runs_is_not_late_and_one_that_ended_neither():
    async def story() -> LoopWatch:
        async with watching(tick_s=0.25) as watch:
            assert watch.lag_s == 0.0
        return watch

    assert asyncio.run(story()).lag_s == 0.0


def test_the_lag_grows_while_it_lasts_and_is_over_when_the_loop_runs_again():
    async def story() -> tuple[float, float]:
        async with watching(stall_s=9.0, tick_s=0.01) as watch:
            block(0.2)
            late_s = watch.lag_s
            while (after_s := watch.lag_s) > 0.05:  # noqa: ASYNC110  # it is the loop that is looked at
                await asyncio.sleep(0)
            return late_s, after_s

    late_s, after_s = asyncio.run(story())
    assert late_s >= 0.18
    assert after_s <= 0.05


def test_its_thread_ends_with_it():
    async def story() -> None:
        async with watching(dump_s=0.1) as watch:
            thread = watch._thread
            assert thread is not None and thread.is_alive()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    run(story())


def test_it_can_be_used_again():
    async def story() -> None:
        watch = watching(tick_s=0.01)
        for _ in range(2):
            async with watch:
                block(0.05)
                assert watch.lag_s > 0.0
            assert watch.lag_s == 0.0

    run(story())
