"""Stories of many at once, as short as they still mean something; at scale: the script itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import uvloop

from benchmarks.router import overload
from benchmarks.router.load import Engine, Load
from benchmarks.router.load_process import waited_s
from benchmarks.router.overload import QUICK, STORIES

pytestmark = pytest.mark.slow

SCALE = replace(QUICK, num_slow=120, seconds=1.0)


@pytest.mark.parametrize("name", STORIES)
def test_nothing_is_lost_and_bounds_are_kept(name: str):
    verdict = uvloop.run(STORIES[name](SCALE))
    assert not verdict.complaints, verdict
    assert len(verdict.seen) >= 7


def test_a_storm_that_costs_too_much_is_told():
    """Whoever allows each refusal a repeat sees twice the load."""
    retry = {"budget": 1.0, "budget_min": 1000, "client_share": 1.0}
    verdict = uvloop.run(overload.storm(SCALE, retry=retry))
    assert any("where clients made" in complaint for complaint in verdict.complaints)


def test_an_engine_works_on_some_lets_some_wait_and_refuses_the_rest():
    async def story() -> None:
        engine = Engine(seats=2, num_waiting=1, work_s=0.001)
        done: list[int] = []
        is_over = asyncio.Event()

        def end(number: int) -> None:
            done.append(number)
            if len(done) == 3:
                is_over.set()

        taken = [engine.take(lambda number=number: end(number)) for number in range(4)]  # type: ignore[misc]  # the default is an int
        assert taken == [True, True, True, False]
        await asyncio.wait_for(is_over.wait(), 10.0)
        assert done == [0, 1, 2]
        assert (engine.num_requests, engine.num_done, engine.num_refused) == (4, 3, 1)
        engine.is_refusing = True
        assert not engine.take(is_over.clear)

    asyncio.run(story())


def test_requests_without_an_answer_are_told():
    async def story() -> None:
        async with Engine(work_s=60.0).serving() as url:
            port = int(url.rpartition(":")[2])
        load = Load(port, 500.0)  # nobody listens there any more
        await load.run(0.05)
        assert load.num_sent == load.num_lost > 0
        assert not load.endings

    asyncio.run(story())


def test_who_waits_for_a_processor_is_told():
    cores = os.sched_getaffinity(0)
    before = waited_s(os.getpid())
    os.sched_setaffinity(0, {min(cores)})
    try:
        rival = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"],
                                 stdout=subprocess.PIPE)  # fmt: skip
        with rival:
            assert rival.stdout is not None
            rival.stdout.readline()  # it runs
            until = time.monotonic() + 5.0
            while waited_s(os.getpid()) <= before and time.monotonic() < until:
                pass
            rival.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert waited_s(os.getpid()) > before
    assert waited_s(-1) == 0.0
