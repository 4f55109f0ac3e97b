"""Suspended sequences: at every moment they give all back, and continue where they were."""

from __future__ import annotations

import itertools

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.scheduling.scheduler import Scheduler
from tests.fakes.clock import ManualClock
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_prompt, make_request

PROMPTS = [make_prompt(50), make_prompt(50), make_prompt(35), [*make_prompt(20), 1], make_prompt(3)]


def make_loop(clock: ManualClock | None = None, **more) -> tuple[Loop, list[str]]:
    """Tight: two rows, few tokens a step, little memory, so that all states are passed through."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=70)
    loop = Loop(Scheduler(config, num_blocks=8, now=clock or ManualClock()))
    ids = []
    for prompt in PROMPTS:
        request = make_request(prompt, max_tokens=8, **more)
        loop.scheduler.add(request)
        ids.append(request.request_id)
    return loop, ids


NUM_STEPS = make_loop()[0].run()


@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "while computing"])
@pytest.mark.parametrize("victim", range(len(PROMPTS)))
def test_a_sequence_can_be_suspended_at_every_step_and_goes_on(victim, inside):
    for step in range(NUM_STEPS + 1):
        loop, ids = make_loop()
        scheduler = loop.scheduler
        counter = itertools.count()

        def strike(_: object, ids=ids, counter=counter, step=step, scheduler=scheduler) -> None:
            at = next(counter)
            if at in (step, step + 1):  # a second time changes nothing
                scheduler.suspend(ids[victim], on=True)
            scheduler.check_invariants()

        between = loop.between
        if inside:
            loop.between = strike
        left = set(ids) - {ids[victim]}
        while left & scheduler.sequences.keys():
            if not inside:
                strike(None)
            loop.step()
        loop.between = between
        for request_id in left:
            assert loop.reasons[request_id] == "length"
        if ids[victim] in scheduler.sequences:
            loop.step()
            scheduler.check_invariants()
            held = ids[victim] in scheduler.suspended
            if held:  # it holds nothing: neither a row nor blocks
                assert scheduler.kv.pool.num_free == len(scheduler.kv.pool.blocks)
                assert len(scheduler.free_rows) == 2
            scheduler.suspend(ids[victim], on=False)
        loop.run()
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            assert loop.outputs[request_id] == true_output(prompt, 8)


def test_others_are_computed_with_what_a_suspended_one_held():
    loop, ids = make_loop()
    for _ in range(6):
        loop.step()
    for request_id in ids[:4]:
        loop.scheduler.suspend(request_id, on=True)
    while ids[4] in loop.scheduler.sequences:
        loop.step()
    assert set(loop.scheduler.suspended) == set(ids[:4]) & set(loop.scheduler.sequences)


def test_a_suspended_one_can_be_aborted_resumed_twice_and_unknown():
    loop, ids = make_loop()
    loop.step()
    for request_id in ids:
        loop.scheduler.suspend(request_id, on=True)
    loop.step()
    loop.scheduler.check_invariants()
    output = loop.scheduler.abort(ids[0])
    assert output is not None
    assert output.finish_reason == "abort"
    for _ in range(2):
        loop.scheduler.suspend(ids[1], on=False)
    loop.scheduler.suspend("nobody", on=True)
    loop.scheduler.suspend(ids[0], on=True)
    loop.scheduler.check_invariants()
    for request_id in ids:
        loop.scheduler.suspend(request_id, on=False)
    loop.run()
    assert {loop.reasons[request_id] for request_id in ids[1:]} == {"length"}


def test_the_deadline_of_a_suspended_one_passes_as_any():
    clock = ManualClock()
    loop, ids = make_loop(clock, deadline_at=clock() + 5.0)
    loop.step()
    for request_id in ids:
        loop.scheduler.suspend(request_id, on=True)
    loop.step()
    clock.advance(6.0)
    loop.scheduler.schedule()
    ended = loop.scheduler.take_finished()
    assert {output.finish_reason for output in ended} == {"deadline"}
    assert not loop.scheduler.sequences
    loop.scheduler.check_invariants()
