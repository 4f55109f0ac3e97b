"""Pauses: round after round at the tick of all deadlines, until there is something to do."""

from __future__ import annotations

import asyncio
import time

import pytest

from octavo_router.http.deadlines import DeadlineTick
from octavo_router.signals.interruptible_sleep import pause
from tests.fakes.clock import ManualClock
from tests.fakes.facts import run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


class Pauser:
    """Pauses for three rounds of a second."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.deadlines = DeadlineTick(asyncio.get_running_loop())
        self.num_rounds = 0
        self.has_work = False
        self.task = asyncio.ensure_future(
            pause(
                self.deadlines, rounds=3, next_round_s=self.next_round_s,
                is_over=lambda: self.has_work,
            )
        )  # fmt: skip

    def next_round_s(self) -> float:
        self.num_rounds += 1
        return 1.0

    async def is_over_after(self, seconds: float) -> bool:
        await asyncio.sleep(0)
        self.clock.advance(seconds)
        self.deadlines.check(self.clock.now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return self.task.done()


def test_a_pause_ends_with_its_last_round(clock: ManualClock):
    async def story() -> None:
        pauser = Pauser(clock)
        assert [await pauser.is_over_after(s) for s in (0.9, 0.15, 1.05, 0.9, 0.15)] == [
            False, False, False, False, True,
        ]  # fmt: skip
        assert (pauser.num_rounds, len(pauser.deadlines)) == (3, 0)

    run(story())


def test_work_ends_it_with_the_round_it_comes_in(clock: ManualClock):
    async def story() -> None:
        pauser = Pauser(clock)
        assert not await pauser.is_over_after(1.05)
        pauser.has_work = True
        assert not await pauser.is_over_after(0.9)
        assert await pauser.is_over_after(0.15)
        assert len(pauser.deadlines) == 0

    run(story())


def test_a_cancelled_pause_is_forgotten_even_in_the_turn_of_its_end(clock: ManualClock):
    async def story() -> None:
        pauser = Pauser(clock)
        assert not await pauser.is_over_after(0.0)
        assert len(pauser.deadlines) == 1
        pauser.has_work = True
        clock.advance(1.1)
        pauser.task.cancel()
        pauser.deadlines.check(clock.now)
        with pytest.raises(asyncio.CancelledError):
            await pauser.task
        assert len(pauser.deadlines) == 0

    run(story())
