"""Background sequences use what others leave; each rule is broken by a scheduler without it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo_engine.state.request import BACKGROUND
from tests.fakes.requests import make_prompt
from tests.fakes.timed_loop import TimedLoop


class Timed(TimedLoop):
    """Sixteen rows."""

    def __init__(self, num_blocks: int = 400, **config: Any) -> None:
        super().__init__(num_blocks, **{"max_num_seqs": 16, **config})

    def add_batch(self, count: int, *, length: int = 40, max_tokens: int = 60) -> list[str]:
        return [
            self.add(make_prompt(length, first=i + 1), max_tokens, priority=BACKGROUND)
            for i in range(count)
        ]


def alone(length: int = 30, max_tokens: int = 50) -> float:
    loop = Timed()
    loop.add_batch(1, max_tokens=3)
    loop.run()
    return loop.until(loop.add(make_prompt(length, first=300), max_tokens))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_batch_makes_others_slower_by_a_tenth_and_by_the_step_under_way(policy):
    loop = Timed(policy=policy)
    loop.add_batch(12, max_tokens=400)
    for _ in range(60):
        loop.step()
    wanted = loop.add(make_prompt(30, first=300), 50)
    beside = loop.until(wanted)
    longest_s = 0.05  # a quarter of max_step_ms: what was begun before it came
    assert beside < alone() * 1.15 + longest_s
    num_batch = sum(s.is_background for batch in loop.batches[-45:] for s in batch.sequences)
    assert num_batch > 0, "the batch advances meanwhile"
    loop.check()


def test_without_others_a_batch_uses_all_there_is_in_short_steps():
    loop = Timed()
    loop.add(make_prompt(100, first=400), 8, priority=BACKGROUND)
    loop.run()  # it knows now how long things take
    loop.durations.clear()
    loop.add_batch(12, length=300)
    loop.run()
    assert max(len(batch.sequences) for batch in loop.batches) == 12
    assert max(loop.durations) < 0.075  # others may come: a quarter of 200 ms, and its own tokens
    loop.check()


def test_rows_are_given_up_to_who_comes():
    loop = Timed(max_num_seqs=4)
    loop.add_batch(4, max_tokens=300)
    for _ in range(20):
        loop.step()
    wanted = [loop.add(make_prompt(20, first=300 + i), 10) for i in range(3)]
    loop.step()
    running = [s.request_id for s in loop.scheduler.running]
    assert running[:3] == wanted and len(running) == 4
    loop.check()


def test_memory_is_given_up_to_who_comes():
    loop = Timed(num_blocks=20)
    loop.add_batch(4, max_tokens=200)
    for _ in range(40):
        loop.step()
    wanted = loop.add(make_prompt(200, first=300), 30)
    assert loop.until(wanted) < 0.6
    loop.check()


def test_no_request_waits_for_a_prefix_that_a_batch_computes_slowly():
    loop = Timed()
    first = loop.add(make_prompt(20, first=400), 300)
    for _ in range(20):
        loop.step()
    shared = make_prompt(300, first=77)
    loop.add(shared, 5, priority=BACKGROUND)
    for _ in range(3):
        loop.step()
    wanted = loop.add([*shared, 1, 2], 5)
    loop.step()
    assert any(s.request_id == wanted for s in loop.batches[-1].sequences)
    loop.until(first)
    loop.check()


def test_a_batch_is_served_in_the_order_it_came():
    loop = Timed(max_num_seqs=2)
    ids = loop.add_batch(5, max_tokens=5)
    loop.run()
    assert list(loop.reasons) == ids


@pytest.mark.parametrize("seed", range(6))
def test_in_any_mixture_everybody_gets_the_truth(seed):
    rng = random.Random(seed)
    loop = Timed(num_blocks=40, max_num_seqs=5, policy=rng.choice(["fcfs", "priority"]))
    for _ in range(25):
        prompt = make_prompt(rng.choice([5, 30, 90]), first=rng.randrange(3))
        loop.add(prompt, rng.randint(1, 60), priority=rng.choice([0, 0, BACKGROUND]))
        for _ in range(rng.randint(0, 12)):
            if loop.scheduler.has_work:
                loop.step()
    loop.check()
