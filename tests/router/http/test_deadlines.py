"""One tick for all who wait: whoever is late hears of it, and thousands do not stop the rest."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from octavo_router.http.deadlines import NEVER, DeadlineTick
from tests.fakes.facts import run


class Late:
    """Counts how often it is told; may end others."""

    def __init__(self, deadlines: DeadlineTick, deadline: float, *ends: Late) -> None:
        self.deadline = deadline
        self.num_notified = 0
        self.was_ended = False
        self._deadlines = deadlines
        self._ends = ends
        deadlines.watch(self)

    def on_deadline(self, now: float) -> None:
        assert not self.was_ended
        self.num_notified += 1
        self.deadline = NEVER
        for other in self._ends:
            other.was_ended = True
            self._deadlines.forget(other)


def test_thousands_that_are_late_let_others_have_their_turn():
    async def story() -> None:
        loop = asyncio.get_running_loop()
        deadlines = DeadlineTick(loop)
        late = [Late(deadlines, 1.0) for _ in range(1000)]
        early = Late(deadlines, 3.0)
        told_at_turn: list[int] = []

        def turn() -> None:
            told_at_turn.append(sum(one.num_notified for one in late))
            if told_at_turn[-1] < 1000:
                loop.call_soon(turn)

        deadlines.check(2.0)
        deadlines.check(2.0)  # a tick meanwhile tells nobody twice
        turn()
        for _ in range(40):
            await asyncio.sleep(0)
        assert told_at_turn[-1] == 1000
        steps = [after - before for before, after in pairwise(told_at_turn)]
        assert 0 < told_at_turn[0] <= 64
        assert max(steps) <= 64
        assert {one.num_notified for one in late} == {1}
        assert early.num_notified == 0
        deadlines.check(3.0)
        assert early.num_notified == 1

    run(story())


def test_who_left_before_its_turn_is_not_told():
    async def story() -> None:
        deadlines = DeadlineTick(asyncio.get_running_loop())
        others = [Late(deadlines, 1.0) for _ in range(200)]
        first = [Late(deadlines, 1.0, *others) for _ in range(200)]
        deadlines.check(2.0)
        for _ in range(20):
            await asyncio.sleep(0)
        # Whoever was told before somebody ended the rest was told once; nobody was told after. How
        # many that are is chance: those who wait are a set.
        assert sum(one.num_notified for one in first) == 200
        assert {one.num_notified for one in others} <= {0, 1}
        assert all(one.was_ended for one in others)

    run(story())


def test_nobody_is_told_after_the_end():
    async def story() -> None:
        deadlines = DeadlineTick(asyncio.get_running_loop())
        late = [Late(deadlines, 1.0) for _ in range(200)]
        deadlines.start()
        deadlines.check(2.0)
        deadlines.stop()
        for _ in range(10):
            await asyncio.sleep(0)
        assert sum(one.num_notified for one in late) == 64

    run(story())
