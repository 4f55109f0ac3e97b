"""What the scheduler promises, one promise at a time. Tokens are checked against the truth.

Red when, among others: a block is shared before it is computed; a copy's source is reused in its
step; a block is not given back; preemption loses or repeats a token; a limit is off by one.
"""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.config import SchedulerConfig
from octavo_engine.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from octavo_engine.scheduling import chunks
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.outputs import StepResult
from tests.fakes.clock import ManualClock
from tests.fakes.kv_machine import Loop, next_token, true_output
from tests.fakes.requests import make_prompt, make_request


def make_loop(num_blocks: int = 64, clock: ManualClock | None = None, **config: Any) -> Loop:
    settings = SchedulerConfig(**{"max_num_seqs": 8, **config})
    return Loop(Scheduler(settings, num_blocks=num_blocks, now=clock or ManualClock()))


def generate(loop: Loop, *prompts: list[int], max_tokens: int = 4, **request: Any) -> list[str]:
    ids = []
    for prompt in prompts:
        made = make_request(prompt, max_tokens=max_tokens, **request)
        loop.scheduler.add(made)
        ids.append(made.request_id)
    loop.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert loop.outputs[request_id] == true_output(prompt, max_tokens)
        assert loop.reasons[request_id] == "length"
    return ids


def test_a_request_is_answered_and_leaves_nothing_behind():
    loop = make_loop()
    generate(loop, make_prompt(40))
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (40, 4, 4)
    assert not loop.scheduler.has_work


def test_the_batch_says_what_changed():
    loop = make_loop()
    loop.scheduler.add(make_request(16, max_tokens=2))
    loop.step()
    loop.step()
    first, second = loop.batches
    (sequence,) = first.admitted
    assert (first.rows, first.starts, first.counts) == ([0], [0], [16])
    assert (first.num_logits, first.samples, first.grown) == ([1], [True], [])
    assert (second.rows, second.starts, second.counts) == ([0], [16], [1])
    assert second.admitted == []
    assert [(g.row, g.place) for g in second.grown] == [(0, 1)]
    assert sequence.finish_reason == "length"


def test_a_long_prompt_is_computed_in_chunks_and_samples_once():
    loop = make_loop(max_num_batched_tokens=16)
    generate(loop, make_prompt(40), max_tokens=1)
    assert [batch.counts for batch in loop.batches] == [[16], [16], [8]]
    assert [batch.num_logits for batch in loop.batches] == [[0], [0], [1]]
    assert [batch.samples for batch in loop.batches] == [[False], [False], [True]]


# -- the cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 32, 33, 47])
def test_an_exact_repeat_computes_one_token(num_tokens):
    loop = make_loop()
    generate(loop, make_prompt(num_tokens), max_tokens=1)
    before = loop.machine.num_computed
    generate(loop, make_prompt(num_tokens), max_tokens=1)
    assert loop.machine.num_computed == before + 1
    assert loop.scheduler.stats().prefix_hits == num_tokens - 1


def test_a_repeat_reports_its_cached_tokens_in_the_first_output():
    loop = make_loop()
    generate(loop, make_prompt(40))
    loop.scheduler.add(make_request(40, max_tokens=2))
    assert [output.num_cached_tokens for output in loop.step()] == [39]
    assert [output.num_cached_tokens for output in loop.step()] == [0]


def test_the_next_turn_of_a_chat_finds_prompt_and_answer():
    loop = make_loop()
    prompt = make_prompt(21)
    generate(loop, prompt, max_tokens=20)
    before = loop.machine.num_computed
    turn = [*prompt, *true_output(prompt, 20), 7, 8, 9]
    generate(loop, turn, max_tokens=1)
    # All but the answer's last token were computed; it and what is new are left.
    assert loop.machine.num_computed == before + 4


def test_a_prompt_that_parts_inside_a_block_copies_up_to_there():
    loop = make_loop()
    stem = make_prompt(24)
    generate(loop, [*stem, 1, 1, 1], max_tokens=1)
    before = loop.machine.num_computed
    generate(loop, [*stem, 2, 2, 2], max_tokens=1)
    assert loop.machine.num_computed == before + 3
    (copy,) = loop.batches[-1].copies
    assert copy.num_tokens == 8


def test_tenants_with_different_salts_share_nothing():
    loop = make_loop()
    generate(loop, make_prompt(40), cache_salt="a")
    before = loop.machine.num_computed
    generate(loop, make_prompt(40), cache_salt="b", max_tokens=1)
    assert loop.machine.num_computed == before + 40


def test_without_caching_everything_is_computed():
    loop = make_loop(enable_prefix_caching=False)
    generate(loop, make_prompt(40), make_prompt(40), max_tokens=1)
    assert loop.machine.num_computed == 80
    assert loop.scheduler.stats().prefix_queries == 40 * 2
    assert loop.scheduler.stats().prefix_hits == 0


@pytest.mark.parametrize("num_tokens", [5, 16, 40, 64])
def test_identical_prompts_in_flight_are_computed_once(num_tokens):
    """Eight arrive together: one computes the prompt, seven wait and compute one token each."""
    loop = make_loop(max_num_batched_tokens=24)
    generate(loop, *[make_prompt(num_tokens)] * 8, max_tokens=1)
    assert loop.machine.num_computed == num_tokens + 7


def test_a_shared_stem_in_flight_is_computed_once():
    loop = make_loop()
    stem = make_prompt(32)
    generate(loop, *([*stem, i, i, i] for i in range(4)), max_tokens=1)
    assert loop.machine.num_computed == 32 + 4 * 3


@pytest.mark.parametrize("when", range(4))
def test_a_wait_for_a_block_ends_when_its_author_is_aborted(when):
    loop = make_loop(max_num_batched_tokens=16)
    author, waiter = (make_request(50, max_tokens=2) for _ in range(2))
    loop.scheduler.add(author)
    loop.scheduler.add(waiter)
    for _ in range(when):
        loop.step()
    output = loop.scheduler.abort(author.request_id)
    assert output is not None
    loop.take(output)
    loop.run()
    assert loop.outputs[waiter.request_id] == true_output(make_prompt(50), 2)
    # What the author had computed was not lost.
    assert loop.machine.num_computed == 50 + 1


def test_a_failed_sequence_is_not_waited_for_and_its_blocks_are_not_found():
    """Its numbers were wrong somewhere: nothing it computed is given to others, mates are
    untouched."""
    loop = make_loop(max_num_batched_tokens=16)
    bad, twin, mate = make_request(40), make_request(40), make_request(make_prompt(9, first=3))
    failures = [make_prompt(40)]
    loop.machine.fails = lambda tokens: (
        bool(failures) and tokens == failures[0] and [failures.pop()] != []
    )
    for request in (bad, twin, mate):
        loop.scheduler.add(request)
    loop.run()
    assert loop.reasons[bad.request_id] == "error"
    assert loop.outputs[bad.request_id] == []
    assert loop.outputs[twin.request_id] == true_output(make_prompt(40), 16)
    assert loop.outputs[mate.request_id] == true_output(make_prompt(9, first=3), 16)
    assert loop.scheduler.stats().nan_failures == 1
    # The twin found nothing of it: both prompts were computed whole.
    assert loop.machine.num_computed == 40 + (40 + 15) + (9 + 15)


def test_a_copy_source_survives_the_step_that_copies_it():
    """Two blocks are free: the source and one more. The source must not be handed out."""
    loop = make_loop(num_blocks=3)
    stem = make_prompt(20)
    generate(loop, stem, max_tokens=1)
    generate(loop, [*stem[:18], 9, 9], max_tokens=1)
    assert loop.reasons
    assert loop.batches[-1].copies or loop.batches[-1].starts == [16]


def test_reset_forgets_the_cache_but_not_under_running_sequences():
    loop = make_loop()
    loop.scheduler.add(make_request(20, max_tokens=3))
    loop.step()
    assert not loop.scheduler.reset_prefix_cache()
    loop.run()
    assert loop.scheduler.reset_prefix_cache()
    before = loop.machine.num_computed
    generate(loop, make_prompt(20), max_tokens=1)
    assert loop.machine.num_computed == before + 20


# -- limits ---------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="empty") as error:
        make_loop().scheduler.add(make_request([]))
    assert error.value.param == "prompt"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_output"),
    [
        (1, 1, 1), (15, 1, 1), (16, 1, 1), (17, 1, 1), (62, 1, 1), (63, 1, 1), (1, None, 63),
        (16, None, 48), (63, None, 1), (1, 63, 63), (1, 64, 63), (1, 10_000, 63), (62, 3, 2),
    ],
)  # fmt: skip
def test_lengths_around_every_edge(num_prompt, max_tokens, num_output):
    loop = make_loop(max_model_len=64)
    request = make_request(num_prompt, max_tokens=max_tokens)
    loop.scheduler.add(request)
    loop.run()
    assert loop.outputs[request.request_id] == true_output(make_prompt(num_prompt), num_output)
    assert loop.reasons[request.request_id] == "length"


@pytest.mark.parametrize("num_prompt", [64, 65])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(num_prompt):
    loop = make_loop(max_model_len=64)
    with pytest.raises(ContextLengthExceeded, match=rf"{num_prompt} tokens.* 64 "):
        loop.scheduler.add(make_request(num_prompt))


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers():
    loop = make_loop(num_blocks=4)
    loop.scheduler.add(make_request(60, max_tokens=5))
    for prompt, max_tokens, param in ((60, 6, "max_tokens"), (65, 1, "prompt")):
        with pytest.raises(InvalidRequest, match=r"65 tokens.* 64 in all") as error:
            loop.scheduler.add(make_request(prompt, max_tokens=max_tokens))
        assert error.value.param == param
    loop.run()


def test_without_max_tokens_the_pool_is_the_limit():
    loop = make_loop(num_blocks=4)
    request = make_request(60, max_tokens=None)
    loop.scheduler.add(request)
    loop.run()
    assert len(loop.outputs[request.request_id]) == 5  # 64 in memory, the last one needs none


def test_one_token_a_step_one_block_one_sequence_still_completes():
    loop = make_loop(num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1)
    generate(loop, make_prompt(10), make_prompt(9, first=1), make_prompt(10), max_tokens=7)


def test_a_full_queue_refuses_and_says_when_to_come_back():
    loop = make_loop(max_queue=2, max_num_seqs=1)
    for first in range(2):
        loop.scheduler.add(make_request(make_prompt(100, first=first)))
    with pytest.raises(QueueFull) as error:
        loop.scheduler.add(make_request(5))
    assert error.value.retry_after_s == 1  # nothing is known yet
    loop.step_s = 10.0
    loop.step()
    loop.scheduler.add(make_request(make_prompt(200, first=2)))
    with pytest.raises(QueueFull) as error:
        loop.scheduler.add(make_request(5))
    assert error.value.retry_after_s == 30  # 300 tokens wait; 100 took ten seconds
    loop.run()


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    loop = make_loop()
    loop.scheduler.add(make_request(5, request_id="a", max_tokens=1))
    with pytest.raises(InvalidRequest, match="in use"):
        loop.scheduler.add(make_request(5, request_id="a"))
    loop.run()
    del loop.reasons["a"]
    loop.scheduler.add(make_request(5, request_id="a", max_tokens=1))
    loop.run()


# -- how it ends ----------------------------------------------------------------------------------


PROMPT = make_prompt(6)
OUTPUT = true_output(PROMPT, 8)


@pytest.mark.parametrize(
    ("request_fields", "num_output", "reason", "stop_token_id"),
    [
        ({"eos": (OUTPUT[2],)}, 3, "stop", None),
        ({"eos": (OUTPUT[2],), "ignore_eos": True}, 8, "length", None),
        ({"stop_token_ids": (OUTPUT[3],)}, 4, "stop", OUTPUT[3]),
        ({"eos": (OUTPUT[3],), "stop_token_ids": (OUTPUT[3],)}, 4, "stop", None),
        (
            {"eos": (OUTPUT[3],), "ignore_eos": True, "stop_token_ids": (OUTPUT[3],)},
            4, "stop", OUTPUT[3],
        ),
        ({"eos": (OUTPUT[2],), "min_tokens": 3}, 3, "stop", None),
        ({"eos": (OUTPUT[2],), "min_tokens": 4}, 8, "length", None),
        ({"eos": (OUTPUT[7],)}, 8, "stop", None),
    ],
)  # fmt: skip
def test_ends(request_fields, num_output, reason, stop_token_id):
    assert len(set(OUTPUT)) == 8
    loop = make_loop()
    request = make_request(PROMPT, max_tokens=8, **request_fields)
    loop.scheduler.add(request)
    last = []
    while loop.scheduler.has_work:
        last = loop.step()
    assert loop.outputs[request.request_id] == OUTPUT[:num_output]
    assert (last[0].finish_reason, last[0].stop_token_id) == (reason, stop_token_id)


@pytest.mark.parametrize("num_done", range(1, 8))
def test_a_resume_goes_on_where_the_other_engine_stopped(num_done):
    loop = make_loop()
    request = make_request(PROMPT, output=OUTPUT[:num_done], max_tokens=8)
    loop.scheduler.add(request)
    loop.run()
    assert loop.outputs[request.request_id] == OUTPUT[num_done:]
    assert loop.machine.num_computed == 6 + 7


def test_a_resume_of_what_was_complete_ends_at_once():
    loop = make_loop()
    loop.scheduler.add(make_request(PROMPT, request_id="long", output=OUTPUT, max_tokens=8))
    loop.scheduler.add(
        make_request(PROMPT, request_id="stop", output=OUTPUT[:3], stop_token_ids=(OUTPUT[2],))
    )
    assert loop.scheduler.has_work
    assert loop.scheduler.schedule().is_empty
    outputs = loop.scheduler.take_finished()
    assert [(o.request_id, o.finish_reason, o.stop_token_id) for o in outputs] == [
        ("long", "length", None),
        ("stop", "stop", OUTPUT[2]),
    ]
    assert not loop.scheduler.has_work


# -- prompt log-probabilities ---------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 40, 300])
@pytest.mark.parametrize("output", [0, 3])
def test_each_prompt_token_but_the_first_is_scored_once(num_tokens, output):
    """Twice over: cached blocks must not swallow scores the second time."""
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=100)
    prompt = make_prompt(num_tokens)
    for _ in range(2):
        request = make_request(
            prompt, output=true_output(prompt, output), max_tokens=5, prompt_logprobs=0
        )
        loop.scheduler.add(request)
        scored: list[int] = []
        while loop.scheduler.has_work:
            for news in loop.step():
                scored += [score.token_id for score in news.prompt_logprobs]
        assert scored == prompt[1:]
        assert loop.outputs[request.request_id] == true_output(prompt, 5)[output:]


def test_a_step_scores_fewer_prompt_tokens_the_wider_their_rows_are(monkeypatch):
    monkeypatch.setattr(chunks, "MAX_CHOICES", 48)
    for wanted, most in ((3, 12), (47, 1), (500, 1)):
        loop = make_loop()
        loop.scheduler.add(make_request(make_prompt(40), max_tokens=2, prompt_logprobs=wanted))
        loop.run()
        assert max(max(batch.num_logits) for batch in loop.batches) == most


# -- failure of a whole step ----------------------------------------------------------------------


def test_when_a_step_fails_as_a_whole_its_sequences_end_and_the_rest_goes_on():
    loop = make_loop(max_num_seqs=2)
    generate(loop, make_prompt(20), max_tokens=1)  # so that a copy is planned, and never made
    scheduler = loop.scheduler
    requests = [make_request(make_prompt(20 + i), max_tokens=3) for i in (0, 1, 2)]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    assert batch.copies
    assert {id(s) for s in batch.admitted} <= {id(s) for s in batch.sequences}
    num = len(batch.sequences)
    outputs = scheduler.update(batch, StepResult(tokens=[-1] * num, failed=list(range(num))), 0.0)
    assert [output.finish_reason for output in outputs] == ["error"] * num
    for output in outputs:
        loop.take(output)
    scheduler.check_invariants()
    loop.run()
    (left,) = [r for r in requests if loop.reasons[r.request_id] == "length"]
    assert loop.outputs[left.request_id] == true_output(left.prompt_token_ids, 3)


def test_the_machine_can_tell_a_lie():
    """The truth these tests compare with depends on every token before."""
    assert next_token([1, 2, 3]) != next_token([2, 1, 3])


def test_the_first_output_tells_how_long_the_request_waited():
    clock = ManualClock()
    loop = make_loop(clock=clock, max_num_seqs=1)
    for _ in range(2):
        loop.scheduler.add(make_request(16, max_tokens=2))
    waits = []
    while loop.scheduler.has_work:
        waits += [output.queued_s for output in loop.step()]
        clock.advance(1.5)
    assert waits == [0.0, None, 3.0, None]


def test_a_long_prompt_alone_is_cut_too_so_that_newcomers_do_not_wait_for_all_of_it():
    loop = make_loop(num_blocks=256, max_step_ms=200.0, max_num_batched_tokens=4096,
                     max_model_len=4096)  # fmt: skip
    loop.step_s = 0.1
    generate(loop, make_prompt(100), max_tokens=1)  # a millisecond a token
    loop.scheduler.add(make_request(3000, max_tokens=1))
    loop.step()
    (first,) = loop.batches[-1].counts
    assert first == pytest.approx(800, abs=1)
