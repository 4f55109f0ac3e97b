"""Snapshots of recurrent states: where a prefix can be gone on with, and who has which slot."""

from __future__ import annotations

import random

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.scheduling.scheduler import Scheduler
from tests.fakes.clock import ManualClock
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_prompt, make_request


def make_loop(
    num_snapshots: int, *, budget: int = 64, num_blocks: int = 200, num_seqs: int = 4
) -> Loop:
    config = SchedulerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=1000
    )
    states = StateSnapshots(config.max_num_seqs, num_snapshots, stride=32)
    return Loop(Scheduler(config, num_blocks=num_blocks, states=states, now=ManualClock()))


def run(loop: Loop, prompt: list[int], name: str, max_tokens: int = 4) -> int:
    """The tokens of the prompt that were found."""
    hits = loop.scheduler.stats().prefix_hits
    loop.scheduler.add(make_request(prompt, request_id=name, max_tokens=max_tokens))
    loop.run()
    assert loop.outputs[name] == true_output(prompt, max_tokens)
    return loop.scheduler.stats().prefix_hits - hits


def test_a_hit_ends_at_a_snapshot() -> None:
    loop = make_loop(20)
    prompt = make_prompt(150)
    assert run(loop, prompt, "first") == 0
    assert run(loop, prompt, "again") == 144
    assert run(loop, prompt[:100], "shorter") == 96
    assert run(loop, prompt[:97], "one-behind") == 96
    assert run(loop, prompt[:96], "not-its-last-token") == 64
    assert run(loop, [*prompt[:70], *make_prompt(50, first=7)], "branch") == 64
    assert run(loop, prompt[:31], "short") == 0


def test_the_next_turn_goes_on_at_the_end_of_the_prompt() -> None:
    for length in (17, 20, 31, 32, 33, 64, 65, 95):
        loop = make_loop(20)
        prompt = make_prompt(length)
        run(loop, prompt, "first", max_tokens=2)
        turn = [*prompt, *true_output(prompt, 2), *make_prompt(9, first=3)]
        saved = max((length - 1) // 16 * 16, (length + 1) // 32 * 32)
        assert run(loop, turn, "second") == saved
        assert run(loop, turn, "again") == (len(turn) - 1) // 16 * 16


def test_a_hit_does_not_depend_on_how_the_prompt_was_cut() -> None:
    for budget in (1, 7, 33, 500):
        loop = make_loop(20, budget=budget)
        prompt = make_prompt(150)
        run(loop, prompt, "first")
        assert loop.scheduler.kv.states is not None
        assert len(loop.scheduler.kv.states.cached) == 5
        assert run(loop, prompt, "again") == 144


def test_generated_tokens_are_saved_too() -> None:
    loop = make_loop(20)
    prompt = make_prompt(60)
    run(loop, prompt, "first", max_tokens=10)
    turn = [*prompt, *true_output(prompt, 10), *make_prompt(9, first=3)]
    assert run(loop, turn, "second") == 64


def test_the_least_used_snapshot_goes_first() -> None:
    loop = make_loop(3)
    left, right, third = (make_prompt(40, first=first) for first in (1, 2, 3))
    run(loop, left, "left")
    run(loop, right, "right")
    run(loop, third, "third")
    assert run(loop, left, "left-again") == 32
    run(loop, make_prompt(40, first=4), "fourth")
    assert run(loop, left, "left-still") == 32
    assert run(loop, right, "right-gone") == 0


@pytest.mark.parametrize("budget", [64, 500])
def test_a_long_prompt_keeps_its_last_snapshots(budget: int) -> None:
    loop = make_loop(2, budget=budget)
    prompt = make_prompt(500)
    run(loop, prompt, "first")
    assert run(loop, prompt, "again") == 496
    assert run(loop, [*prompt[:490], *make_prompt(50, first=7)], "branch") == 480


def test_without_room_for_snapshots_all_is_computed() -> None:
    loop = make_loop(0)
    prompt = make_prompt(100)
    run(loop, prompt, "first")
    assert run(loop, prompt, "again") == 0


def test_answers_to_one_prompt_wait_for_its_snapshot_and_no_longer() -> None:
    loop = make_loop(20, budget=200)
    prompt = make_prompt(100)
    for index in range(4):
        loop.scheduler.add(make_request(prompt, request_id=f"a{index}", max_tokens=3))
    loop.run()
    assert all(loop.outputs[f"a{index}"] == true_output(prompt, 3) for index in range(4))
    assert loop.scheduler.stats().prefix_hits == 3 * 96
    # Nothing that they could wait for: too short, or no snapshot comes where they part.
    other = make_prompt(63, first=5)
    for prompt in (other[:16], other[:16], other, other[:30]):
        loop.scheduler.add(make_request(prompt, max_tokens=3))
    assert len(loop.scheduler.schedule().sequences) == 4


def test_a_missing_block_hides_the_snapshots_behind_it() -> None:
    loop = make_loop(20)
    prompt = make_prompt(150)
    run(loop, prompt, "first")
    kv = loop.scheduler.kv
    digests = list(kv.states.cached) if kv.states is not None else []
    block = kv.pool.cache.get(digests[1])
    assert block is not None
    kv.pool.cache.retract(block)
    assert run(loop, prompt, "again") == 32


def test_a_spoiled_sequence_leaves_no_snapshot() -> None:
    loop = make_loop(20)
    prompt = make_prompt(100)
    loop.machine.fails = lambda tokens: tokens[:100] == prompt
    loop.scheduler.add(make_request(prompt, request_id="bad", max_tokens=2))
    loop.run()
    assert loop.reasons["bad"] == "error"
    assert loop.scheduler.kv.states is not None
    assert not loop.scheduler.kv.states.cached
    loop.machine.fails = lambda tokens: False
    assert run(loop, prompt, "good") == 0


def test_deferred_tokens_are_computed_from_a_snapshot() -> None:
    """What a late mask puts off is not computed upon the state that stands behind it."""
    rng = random.Random(3)
    loop = make_loop(20)
    execute = loop.machine.execute

    def late(batch):
        result = execute(batch)
        for index, samples in enumerate(batch.samples):
            if samples and rng.random() < 0.3:
                result.deferred.append(index)
                result.tokens[index] = -1
        return result

    loop.machine.execute = late  # type: ignore[method-assign]
    prompts = {f"r{index}": make_prompt(70 + index, first=index) for index in range(3)}
    for name, prompt in prompts.items():
        loop.scheduler.add(make_request(prompt, request_id=name, max_tokens=12))
    loop.run()
    for name, prompt in prompts.items():
        assert loop.outputs[name] == true_output(prompt, 12)
    assert loop.scheduler.stats().preemptions > 0


def test_what_is_cleared_or_aborted_gives_its_slots_back() -> None:
    loop = make_loop(6)
    run(loop, make_prompt(100), "first")
    loop.between = lambda _: loop.take(aborted) if (aborted := loop.scheduler.abort("x")) else None
    loop.scheduler.add(make_request(make_prompt(150, first=9), request_id="x", max_tokens=2))
    loop.step()
    assert loop.scheduler.reset_prefix_cache()
    assert loop.scheduler.kv.states is not None
    assert sorted(loop.scheduler.kv.states.free) == list(range(4, 10))


def test_a_snapshot_from_outside_takes_the_slot_that_was_not_used_for_longest() -> None:
    states = StateSnapshots(2, 2, stride=32)
    loaded: list[int] = []
    for digest in (b"a", b"b", b"a", b"c"):
        assert states.place(digest, loaded.append)
    assert loaded == [3, 2, 3] and list(states.cached) == [b"b", b"c"]

    def fail(slot: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        states.place(b"d", fail)
    assert list(states.cached) == [b"c"] and states.free == [2]
    assert not StateSnapshots(2, 0).place(b"a", loaded.append)


def test_a_prefix_may_go_on_outside() -> None:
    states = StateSnapshots(1, 4, stride=32)
    digests = [bytes([i]) for i in range(9)]
    states.place(digests[1], lambda slot: None)
    assert states.longest(digests, 9) == 2
    assert states.longest(digests, 9, lambda digest: digest == digests[5]) == 6
    assert states.longest(digests, 5, lambda digest: digest == digests[5]) == 2
    assert states.longest(digests, 9, lambda digest: digest == digests[6]) == 7
    assert states.likely_ends(9) == [2, 4, 6, 8, 9] and states.likely_ends(4) == [2, 4]
