"""The event loop's delay is measured, and a loop that stands still is noticed from outside."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading

from octavo_router import loop_watch
from octavo_router.loop_watch import LoopWatch
from octavo_router.metrics import RouterMetrics
from tests.fakes.facts import run, until


def test_a_loop_that_turns_has_hardly_any_lag():
    async def story() -> None:
        metrics = RouterMetrics()
        async with LoopWatch(metrics, tick_s=0.001) as watch:
            await until(lambda: metrics.loop_lag.count >= 5)
            assert watch.lag_s < 1.0
        assert metrics.process.loop_stalls == 0

    run(story())


def test_a_loop_that_stood_still_is_counted(monkeypatch):
    monkeypatch.setattr(loop_watch, "STALL_S", 0.05)

    async def story() -> None:
        metrics = RouterMetrics()
        async with LoopWatch(metrics, tick_s=0.001) as watch:
            seen: list[float] = []
            block = threading.Event()

            def look_from_outside() -> None:
                while not seen or seen[-1] < 0.1:
                    seen.append(watch.lag_s)
                block.set()

            looker = threading.Thread(target=look_from_outside)
            looker.start()
            block.wait(60)  # the mistake: blocks the loop until it was seen from outside
            await until(lambda: metrics.process.loop_stalls == 1)
            looker.join()
            assert metrics.loop_lag.sum >= 0.1

    run(story())


def stands_still(seen: threading.Event) -> None:
    seen.wait(30)


def test_what_holds_it_up_is_written_down_while_it_stands(monkeypatch, tmp_path):
    """All threads' stacks, once for each stand-still: afterwards nobody could tell any more."""
    monkeypatch.setattr(loop_watch, "STALL_S", 0.02)
    monkeypatch.setattr(loop_watch, "DUMP_S", 0.1)
    dumps = []
    seen = threading.Event()
    real = faulthandler.dump_traceback

    def dump(file, all_threads):
        real(file, all_threads)
        dumps.append(all_threads)
        seen.set()

    monkeypatch.setattr(faulthandler, "dump_traceback", dump)

    async def story() -> None:
        async with LoopWatch(RouterMetrics(), tick_s=0.001):
            stands_still(seen)

    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr(sys, "__stderr__", stderr)
        run(story())
        stderr.seek(0)
        text = stderr.read()
    assert dumps == [True]
    assert "in stands_still" in text


def test_its_thread_ends_with_it():
    async def story() -> None:
        async with LoopWatch(RouterMetrics(), tick_s=0.001) as watch:
            thread = watch._thread
            assert thread.is_alive()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    run(story())
