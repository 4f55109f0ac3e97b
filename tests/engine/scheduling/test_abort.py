"""Abort in every state and at every moment. Red when: a block, row or queue place is not given
back, a stale result is delivered, a second abort does harm, or the others' tokens change."""

from __future__ import annotations

import itertools

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.scheduling.scheduler import Scheduler
from tests.fakes.clock import ManualClock
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_prompt, make_request

PROMPTS = [make_prompt(50), make_prompt(50), make_prompt(35), [*make_prompt(20), 1], make_prompt(3)]


def make_loop() -> tuple[Loop, list[str]]:
    """Tight: two rows, few tokens a step, little memory, so that all states are passed through."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=70)
    loop = Loop(Scheduler(config, num_blocks=8, now=ManualClock()))
    ids = []
    for prompt in PROMPTS:
        request = make_request(prompt, max_tokens=8)
        loop.scheduler.add(request)
        ids.append(request.request_id)
    return loop, ids


NUM_STEPS = make_loop()[0].run()


def abort(loop: Loop, request_id: str) -> bool:
    output = loop.scheduler.abort(request_id)
    loop.scheduler.check_invariants()
    if output is None:
        return False
    assert (output.request_id, output.finish_reason) == (request_id, "abort")
    loop.take(output)
    return True


@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "while computing"])
@pytest.mark.parametrize("victim", range(len(PROMPTS)))
def test_abort_at_every_step_in_every_state(victim, inside):
    for step in range(NUM_STEPS + 1):
        loop, ids = make_loop()
        counter = itertools.count()

        def strike(_: object, loop=loop, ids=ids, counter=counter, step=step) -> None:
            if next(counter) == step:
                was_live = ids[victim] in loop.scheduler.sequences
                assert abort(loop, ids[victim]) == was_live
                assert not abort(loop, ids[victim])

        if inside:
            loop.between = strike
        else:
            while loop.scheduler.has_work:
                strike(None)
                loop.step()
        loop.run()
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            output = loop.outputs.get(request_id, [])
            assert output == true_output(prompt, 8)[: len(output)]
            if request_id != ids[victim]:
                assert loop.reasons[request_id] == "length"
                assert len(output) == 8


def test_an_unknown_id_is_no_error():
    loop, _ = make_loop()
    assert loop.scheduler.abort("nobody") is None


def test_an_aborted_id_can_be_used_again_at_once():
    loop, ids = make_loop()
    loop.step()
    assert abort(loop, ids[0])
    del loop.reasons[ids[0]], loop.outputs[ids[0]]
    loop.scheduler.add(make_request(PROMPTS[2], request_id=ids[0], max_tokens=4))
    loop.run()
    assert loop.outputs[ids[0]] == true_output(PROMPTS[2], 4)
