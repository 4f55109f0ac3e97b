"""Keys are looked at one at a time, soon, and again: exact times on a clock that is told."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from octavo_operator.metrics import OperatorMetrics
from octavo_operator.watch.work_queue import KeyOutcome, Pace, Schedule, WorkQueue


class Still(Random):
    """The middle of every range."""

    def random(self) -> float:
        return 0.5


def make_schedule(**pace) -> Schedule[str]:
    return Schedule(Pace(**pace), Still())


def test_a_burst_of_events_is_one_look():
    schedule = make_schedule()
    for _ in range(100):
        schedule.add("a", 10.0)
    assert schedule.take(10.0) == "a"
    assert schedule.take(10.0) is None


def test_a_key_that_is_worked_on_is_not_handed_out_twice():
    schedule = make_schedule(least_gap_s=0.1)
    schedule.add("a", 0.0)
    assert schedule.take(0.0) == "a"
    schedule.add("a", 0.0)
    assert schedule.take(5.0) is None
    schedule.done("a", 5.0)
    assert schedule.take(5.05) is None
    assert schedule.take(5.1) == "a"


def test_a_key_without_events_is_looked_at_again_after_the_resync():
    schedule = make_schedule(resync_s=300.0)
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.done("a", 1.0)
    assert schedule.next_due() == 301.0
    assert schedule.take(300.9) is None
    assert schedule.take(301.0) == "a"


def test_resyncs_are_spread():
    schedule = Schedule[str](Pace(resync_s=100.0, resync_jitter=0.2), Random(7))
    dues = []
    for number in range(50):
        key = f"k{number}"
        schedule.add(key, 0.0)
        assert schedule.take(0.0) == key
        schedule.done(key, 0.0)
        dues.append(schedule._due[key])
    assert 80.0 <= min(dues) < 85.0
    assert 115.0 < max(dues) <= 120.0


def test_failures_wait_twice_as_long_each_time_and_no_longer_than_the_longest():
    schedule = make_schedule(first_retry_s=1.0, longest_retry_s=60.0)
    delays, now = [], 0.0
    schedule.add("a", now)
    for _ in range(8):
        assert schedule.take(now) == "a"
        delays.append(schedule.failed("a", now))
        now = schedule.next_due() or 0.0
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    schedule.take(now)
    schedule.done("a", now)
    schedule.add("a", now + 1)
    schedule.take(now + 1)
    assert schedule.failed("a", now) == 1


def test_events_about_a_broken_key_do_not_shorten_its_first_seconds():
    schedule = make_schedule(first_retry_s=64.0)
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.failed("a", 0.0)
    schedule.add("a", 1.0)
    assert schedule.next_due() == 5.0


def test_the_server_says_when():
    schedule = make_schedule()
    schedule.add("a", 0.0)
    schedule.take(0.0)
    assert schedule.failed("a", 0.0, retry_after_s=30.0) == 30.0


def test_a_forgotten_key_leaves_nothing_behind():
    schedule = make_schedule()
    for number in range(1000):
        key = f"k{number}"
        schedule.add(key, 0.0)
        assert schedule.take(0.0) == key
        schedule.failed(key, 0.0)
        assert schedule.take(1e6) == key
        schedule.forget(key, 1e6)
    assert len(schedule) == 0
    assert schedule.num_working == 0
    assert not (schedule._failures or schedule._not_before or schedule._again or schedule._heap)


def test_a_broken_key_delays_nobody_and_is_counted_as_a_bug():
    async def story() -> list[str]:
        seen: list[str] = []
        done = asyncio.Event()

        async def work(key: str) -> KeyOutcome:
            seen.append(key)
            if key == "broken":
                raise ZeroDivisionError
            if key == "last":
                done.set()
            return KeyOutcome()

        metrics = OperatorMetrics()
        clock = asyncio.get_running_loop().time
        queue = WorkQueue(work, make_schedule(), clock=clock, metrics=metrics, num_workers=1)
        for key in ("broken", "good", "last"):
            queue.add(key)
        task = asyncio.create_task(queue.run())
        async with asyncio.timeout(60):
            await done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert metrics.bugs == 1
        return seen

    assert asyncio.run(story()) == ["broken", "good", "last"]


def test_slow_keys_share_the_workers_with_quick_ones():
    async def story() -> None:
        release = asyncio.Event()
        quick = asyncio.Event()

        async def work(key: str) -> KeyOutcome:
            if key == "slow":
                await release.wait()
            else:
                quick.set()
            return KeyOutcome()

        clock = asyncio.get_running_loop().time
        queue = WorkQueue(
            work, make_schedule(), clock=clock, metrics=OperatorMetrics(), num_workers=2
        )
        task = asyncio.create_task(queue.run())
        queue.add("slow")
        queue.add("quick")
        async with asyncio.timeout(60):
            await quick.wait()
        release.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(story())
