"""One request of many sequences beside requests of one: which of them wait, and for how long.

Red when: further sequences decode or prefill without paying; the limit outlives the small requests;
nothing is left to the large request; rows are not given up; the limit holds for who is alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo_engine.errors import QueueFull
from octavo_engine.scheduling.request_shares import LATELY_S
from octavo_engine.state.request import BACKGROUND
from tests.fakes.requests import make_prompt
from tests.fakes.timed_loop import TimedLoop

pytestmark = pytest.mark.slow


class Timed(TimedLoop):
    """Sixty-four rows."""

    def __init__(self, num_blocks: int = 2000, **config: Any) -> None:
        super().__init__(num_blocks, **{"max_num_seqs": 64, **config})

    def add_large(
        self, count: int, *, group: str = "large", length: int = 20, max_tokens: int = 16,
        **fields: Any,
    ) -> list[str]:  # fmt: skip
        return [
            self.add(make_prompt(length, first=i % 499 + 1), max_tokens, group=group, **fields)
            for i in range(count)
        ]

    def ask(self, max_tokens: int = 8, *, first: int = 300) -> float:
        """Seconds that a small request takes."""
        return self.until(self.add(make_prompt(4, first=first), max_tokens))


def quiet() -> float:
    loop = Timed()
    loop.ask()
    return max(loop.ask(first=301 + i) for i in range(20))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_small_request_takes_at_most_twice_as_long_beside_a_large_one(policy):
    loop = Timed(policy=policy)
    loop.ask()
    ids = loop.add_large(1000)
    took = [loop.ask(first=300 + i % 100) for i in range(60)]
    assert not all(id_ in loop.reasons for id_ in ids), "it was there all the time"
    assert max(took[1:]) <= 2 * quiet()
    loop.check()


def test_long_prompts_of_a_large_request_leave_small_ones_their_time():
    loop = Timed()
    loop.ask()
    loop.add_large(200, length=300, max_tokens=4)
    took = [loop.ask(first=300 + i % 100) for i in range(60)]
    assert max(took[1:]) <= 2 * quiet()
    loop.check()


def test_the_large_request_advances_beside_small_ones_without_end():
    loop = Timed()
    loop.ask()
    ids = loop.add_large(100, max_tokens=8)
    began_at = loop.clock()
    number = 0
    while not all(id_ in loop.reasons for id_ in ids):
        loop.ask(first=300 + number % 100)
        number += 1
        assert loop.clock() - began_at < 20.0
    assert list(loop.reasons)[1:] != ids, "small ones were answered meanwhile"
    loop.check()


def test_a_large_request_that_is_alone_loses_nothing():
    def seconds(group: str) -> tuple[float, list[Any]]:
        loop = Timed()
        loop.ask()
        loop.clock.advance(LATELY_S * 1.01)
        took = loop.until(*loop.add_large(1000, group=group))
        loop.check()
        return took, [(b.rows, b.counts) for b in loop.batches]

    assert seconds("large") == seconds("")


def test_the_limit_ends_soon_after_the_last_small_request():
    loop = Timed()
    loop.ask()
    loop.add_large(300, max_tokens=200)
    loop.ask()
    loop.step()
    beside = len(loop.batches[-1].sequences)
    until = loop.clock() + LATELY_S
    while loop.clock() <= until + loop.step_s:
        loop.step()
    assert beside < 10
    for _ in range(10):
        loop.step()
    assert len(loop.batches[-1].sequences) == 64
    loop.check()


def test_a_row_is_given_up_to_a_small_request_and_not_taken_back():
    loop = Timed(max_num_seqs=8)
    loop.add_large(8, max_tokens=100)
    for _ in range(5):
        loop.step()
    assert not loop.scheduler.free_rows
    wanted = [loop.add(make_prompt(4, first=300 + i), 8) for i in range(2)]
    for _ in range(3):
        loop.step()
    running = {s.request_id for s in loop.scheduler.running}
    assert running >= set(wanted)
    assert loop.scheduler.stats().preemptions == 2
    loop.until(*wanted)
    assert loop.scheduler.stats().preemptions == 2
    loop.check()


def test_two_large_requests_take_turns_and_are_not_limited():
    loop = Timed(max_num_seqs=8)
    loop.add_large(40, group="a", max_tokens=4)
    loop.add_large(40, group="b", max_tokens=4)
    sizes = []
    for _ in range(12):
        loop.step()
        sizes.append(len(loop.batches[-1].sequences))
    groups = [s.group for s in loop.scheduler.running]
    assert abs(groups.count("a") - groups.count("b")) <= 1
    assert max(sizes) == 8
    loop.check()


def test_small_requests_do_not_keep_a_large_one_from_its_turn():
    """Where rows are scarce and small requests never end, each request has its turn."""
    loop = Timed(max_num_seqs=2)
    ids = loop.add_large(6, max_tokens=4)
    small = 0
    while not all(id_ in loop.reasons for id_ in ids):
        while sum(not s.group for s in loop.scheduler.sequences.values()) < 6:
            loop.add(make_prompt(4, first=300 + small % 100), 4)
            small += 1
        loop.step()
        assert small < 200
    loop.check()


def test_no_request_waits_for_a_prefix_that_a_large_one_computes_slowly():
    loop = Timed()
    loop.ask()
    stem = make_prompt(600, first=77)
    loop.add_large(1)
    loop.add([*stem, 1], 5, group="large")
    keeps_it_limited = loop.add(make_prompt(4, first=400), 100)
    for _ in range(3):
        loop.step()
    wanted = loop.add([*stem, 2], 5)
    loop.step()
    loop.step()
    assert any(s.request_id == wanted for s in loop.batches[-1].sequences)
    loop.until(keeps_it_limited)
    loop.check()


def test_background_sequences_are_in_no_request():
    loop = Timed()
    loop.add_large(20, priority=BACKGROUND, max_tokens=4)
    assert all(not s.group for s in loop.scheduler.waiting)
    loop.check()


@pytest.mark.parametrize("seed", range(40))
def test_in_any_mixture_everybody_gets_the_truth(seed):
    rng = random.Random(seed)
    loop = Timed(
        num_blocks=rng.choice([12, 40, 200]), max_num_seqs=rng.choice([1, 2, 5, 16]),
        max_num_batched_tokens=rng.choice([1, 16, 500]), max_queue=rng.choice([10, 100]),
        policy=rng.choice(["fcfs", "priority"]), aging_s=rng.choice([0.0, 0.1, 5.0]),
    )  # fmt: skip
    for _ in range(40):
        prompt = make_prompt(rng.choice([5, 30, 90]), first=rng.randrange(3))
        group = rng.choice(["", "", "a", "b", "c"])
        try:
            loop.add(prompt, rng.choice([1, 5, 30]), group=group, priority=rng.randrange(3))
        except QueueFull:
            loop.scheduler.check_invariants()
        id_ = rng.choice(list(loop.prompts))
        if rng.random() < 0.2:
            loop.scheduler.suspend(id_, on=True)
        for _ in range(rng.randrange(4)):
            loop.step()
        loop.scheduler.suspend(id_, on=False)
    for id_ in loop.prompts:
        loop.scheduler.suspend(id_, on=False)
    loop.check()
    shares = loop.scheduler.shares
    assert (shares._num_singles, shares._counts, shares._num_large) == (0, {}, 0)
