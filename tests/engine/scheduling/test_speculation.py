"""Guesses in the scheduler: worth their price or not made, verified as one batch, and harmless.

Red when: a guess changes a token, holds a block too many, is published before it is true, takes
what somebody else needs, or is made where it does not pay.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.config import SchedulerConfig, SpeculationConfig
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.scheduling.speculation import Speculation, SpeculationGain
from octavo_engine.scheduling.step_time import StepTimeModel
from tests.fakes.clock import ManualClock
from tests.fakes.guessing import AnswerGuesser
from tests.fakes.kv_machine import Loop, true_output
from tests.fakes.requests import make_prompt, make_request

if TYPE_CHECKING:
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.sequence import Sequence


def guesser(sequence: Sequence, **habits: Any) -> AnswerGuesser:
    truth = true_output(list(sequence.request.prompt_token_ids), 300)
    return AnswerGuesser(truth, sequence.num_prompt_tokens, **habits)


def make_loop(
    *,
    num_blocks: int = 64,
    honesty: float = 0.8,
    least: int = 0,
    most: int = 5,
    seed: int = 0,
    **config: Any,
) -> Loop:
    settings = SchedulerConfig(**{"max_num_seqs": 4, "max_model_len": 400, **config})
    loop = Loop(Scheduler(settings, num_blocks=num_blocks, now=ManualClock()))
    loop.step_s = 0.0  # no time is known: whatever is guessed is verified
    rng = random.Random(seed)
    loop.scheduler._speculation = Speculation(
        lambda sequence: guesser(sequence, rng=rng, honesty=honesty, least=least, most=most)
    )
    return loop


# -- the price ------------------------------------------------------------------------------------


def throughput(step_s: float, row_s: float, num_tokens: int, rate: float, count: int) -> float:
    expected = num_tokens + sum(rate ** (i + 1) for i in range(count))
    return expected / (step_s + count * row_s)


@pytest.mark.parametrize("seed", range(20))
def test_as_many_guesses_are_taken_as_make_tokens_come_fastest(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        step_s, row_s = rng.uniform(0.001, 0.1), rng.uniform(0.0, 0.01)
        num_tokens, rate, limit = rng.randint(1, 64), rng.random(), rng.randint(0, 8)
        bargain = SpeculationGain(step_s=step_s, num_tokens=num_tokens, row_s=row_s)
        count = bargain.take([rate] * limit)
        speeds = [throughput(step_s, row_s, num_tokens, rate, n) for n in range(limit + 1)]
        assert speeds[count] == pytest.approx(max(speeds), rel=1e-9)
        expected = num_tokens + sum(rate ** (i + 1) for i in range(count))
        assert bargain.num_tokens == pytest.approx(expected)
        assert bargain.step_s == pytest.approx(step_s + count * row_s)


def test_one_stream_is_guessed_ahead_and_a_full_batch_is_not() -> None:
    """14 ms a step and 1.6 ms a row: the memory's pace for one sequence, the cores' for many."""

    def counts(num_decodes: int, rate: float) -> int:
        step_s = 0.0124 + 0.0016 * num_decodes
        bargain = SpeculationGain(step_s=step_s, num_tokens=num_decodes, row_s=0.0016)
        return bargain.take([rate] * 4)

    assert [counts(1, rate) for rate in (0.05, 0.3, 0.6, 0.95)] == [0, 1, 3, 4]
    assert [counts(32, rate) for rate in (0.05, 0.3, 0.6, 0.75, 0.95)] == [0, 0, 0, 0, 4]


def test_guesses_are_taken_as_far_as_they_are_likely_enough() -> None:
    """A row costs a fifth of a step: the third is right four times in five, if the second is."""

    def count(*rates: float) -> int:
        bargain = SpeculationGain(step_s=0.010, num_tokens=1, row_s=0.002)
        return bargain.take(list(rates))

    assert count(0.9, 0.9, 0.8) == 3
    assert count(0.9, 0.3, 0.8) == 1
    assert count(0.1, 0.9, 0.9) == 0


def test_the_price_of_a_row_is_learned_from_steps_of_different_sizes_and_forgotten() -> None:
    model = StepTimeModel()
    assert model.row_s() == 0.0 and not model.knows_rows
    for _ in range(10):
        model.observe(8, 0, 0.028)
    assert model.row_s() == 0.0 and not model.knows_rows
    model.observe(1, 3, 0.5)  # prompt tokens say nothing of it
    assert not model.knows_rows
    model.observe(10, 0, 0.032)
    assert model.row_s() == pytest.approx(0.002) and model.knows_rows
    for _ in range(200):
        model.observe(8, 0, 0.028)
    assert not model.knows_rows


@pytest.mark.parametrize(("rate", "num_tried"), [(0.9, 2), (0.2, 2), (0.05, 0)])
def test_while_the_price_is_unknown_little_is_tried(rate: float, num_tried: int) -> None:
    """A quarter of the nine rows that there are; nothing of those that are hardly ever right."""
    loop = make_loop(num_blocks=100, max_num_seqs=9, honesty=rate, least=4)
    for first in range(9):
        loop.scheduler.add(make_request(make_prompt(5, first=first), max_tokens=60))
    loop.scheduler._step_time.observe(9, 0, 0.03)
    for _ in range(3):
        loop.step()
    assert sum(map(len, loop.batches[-1].drafts.values())) == num_tried


def paid_drafts(num_sequences: int, rate: float) -> tuple[int, float]:
    """Guesses that were verified, and the time a token took, as a share of that without them. The
    machine is one whose steps take 12.4 ms and 1.6 ms a row."""
    seconds = []
    for with_drafts in (True, False):
        steps: list[float] = []
        loop = make_loop(num_blocks=400, max_num_seqs=num_sequences, honesty=rate, seed=1)
        if not with_drafts:
            loop.scheduler._speculation = None

        def measure(batch: ScheduledBatch, loop: Loop = loop, steps: list[float] = steps) -> None:
            prefill = batch.num_tokens - batch.num_decodes
            loop.step_s = 0.0124 + 0.0016 * batch.num_decodes + 0.0004 * prefill
            steps.append(loop.step_s)

        loop.between = measure
        for first in range(num_sequences):
            loop.scheduler.add(make_request(make_prompt(8, first=first), max_tokens=190))
        loop.run()
        seconds.append(sum(steps))
        stats = loop.scheduler.stats()
        if with_drafts:
            num_drafts = stats.spec_draft_tokens
    return num_drafts, seconds[0] / seconds[1]


@pytest.mark.slow
def test_speculation_is_never_much_slower_than_none_and_fast_where_guesses_are_good() -> None:
    num_drafts, share = paid_drafts(1, 0.95)
    assert num_drafts > 50 and share < 0.6
    num_drafts, share = paid_drafts(1, 0.05)
    assert num_drafts < 30 and share < 1.02
    num_drafts, share = paid_drafts(24, 0.4)
    assert num_drafts < 100 and share < 1.01  # the price of a row had to be found out
    _, share = paid_drafts(24, 0.95)
    assert share < 1.0


# -- the batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("caching", [True, False])
def test_guesses_change_no_token_whatever_else_is_in_the_batch(seed: int, caching: bool) -> None:
    """A small pool, small steps, shared beginnings, preemption, aborts; honest guesses and lies."""
    rng = random.Random(seed)
    loop = make_loop(
        num_blocks=rng.choice([9, 14, 40]), honesty=rng.choice([0.3, 0.9, 1.0]),
        most=rng.choice([1, 4, 20]), seed=seed, max_num_batched_tokens=rng.choice([7, 24, 64]),
        max_model_len=120, enable_prefix_caching=caching,
    )  # fmt: skip
    scheduler = loop.scheduler
    stem = make_prompt(50)
    requests = {}
    for number in range(25):
        prompt = stem[: rng.randint(1, 50)] + [number] * rng.choice([0, 3])
        request = make_request(prompt, max_tokens=rng.choice([1, 2, 17, 60]))
        scheduler.add(request)
        requests[request.request_id] = request
        for _ in range(rng.randint(0, 4)):
            loop.step()
        if scheduler.running and rng.random() < 0.2:
            scheduler._preempt(rng.choice(scheduler.running))
            scheduler.check_invariants()
        if scheduler.sequences and rng.random() < 0.1:
            aborted = scheduler.abort(rng.choice(list(scheduler.sequences)))
            assert aborted is not None
            loop.take(aborted)
    loop.run()
    for request_id, request in requests.items():
        output = loop.outputs[request_id]
        truth = true_output(request.prompt_token_ids, request.params.max_tokens or 0)
        assert output == truth[: len(output)]
        assert loop.reasons[request_id] == "abort" or len(output) == len(truth)
    stats = scheduler.stats()
    assert 0 < stats.spec_accepted_tokens <= stats.spec_draft_tokens
    assert sum(stats.spec_accepted_per_pos) == stats.spec_accepted_tokens
    assert stats.spec_accepted_per_pos == sorted(stats.spec_accepted_per_pos, reverse=True)


def test_right_guesses_save_steps_and_are_counted() -> None:
    loop = make_loop(honesty=1.0, least=4, most=4)
    request = make_request(20, max_tokens=21)
    loop.scheduler.add(request)
    assert loop.run() == 1 + 4  # one token, then five a step
    assert loop.outputs[request.request_id] == true_output(make_prompt(20), 21)
    stats = loop.scheduler.stats()
    assert (stats.spec_drafts, stats.spec_draft_tokens, stats.spec_accepted_tokens) == (4, 16, 16)
    assert stats.spec_accepted_per_pos == [4, 4, 4, 4]
    assert stats.generation_tokens == 21


def test_no_more_is_guessed_than_the_answer_may_have() -> None:
    for max_tokens in range(1, 9):
        loop = make_loop(honesty=1.0, least=5)
        loop.scheduler.add(make_request(5, max_tokens=max_tokens))
        loop.run()
        computed = [batch.starts[0] + batch.counts[0] for batch in loop.batches]
        assert max(computed) == 5 + max_tokens - 1  # the last token is never computed


def test_nothing_is_guessed_that_ends_the_sequence() -> None:
    prompt = make_prompt(12)
    truth = true_output(prompt, 30)
    loop = make_loop(honesty=1.0, least=9, most=9)
    request = make_request(prompt, max_tokens=30, stop_token_ids=(truth[14],))
    loop.scheduler.add(request)
    loop.run()
    assert loop.outputs[request.request_id] == truth[: truth.index(truth[14]) + 1]
    assert loop.reasons[request.request_id] == "stop"
    assert all(truth[14] not in drafts for b in loop.batches for drafts in b.drafts.values())


def test_wrong_guesses_never_enter_the_prefix_cache() -> None:
    """All wrong, across block borders; check_contents compares what is published each step."""
    loop = make_loop(honesty=0.0, most=40)
    first = make_request(14, max_tokens=60)
    loop.scheduler.add(first)
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.spec_draft_tokens > 100 and stats.spec_accepted_tokens == 0
    for length in (15, 33, 73):
        prompt = [*make_prompt(14), *true_output(make_prompt(14), 60)][:length]
        request = make_request(prompt, max_tokens=5)
        loop.scheduler.add(request)
        loop.run()
        assert loop.outputs[request.request_id] == true_output(prompt, 5)


def test_no_sequence_is_preempted_for_a_guess() -> None:
    """One block is free, which the second sequence needs in a moment: guesses do without."""
    loop = make_loop(num_blocks=5, honesty=0.01, least=40, most=40)
    loop.scheduler._admission.ratio = 0.0
    for length, max_tokens in ((20, 28), (31, 6)):
        loop.scheduler.add(make_request(make_prompt(length, first=length), max_tokens=max_tokens))
    loop.run()
    assert loop.scheduler.stats().spec_draft_tokens > 20
    assert loop.scheduler.stats().preemptions == 0


def test_prompts_advance_beside_guesses() -> None:
    """Twelve tokens a step, and four sequences that would use a hundred."""
    loop = make_loop(max_num_seqs=5, num_blocks=100, honesty=0.01, least=40, most=40,
                     max_num_batched_tokens=12)  # fmt: skip
    for first in range(4):
        loop.scheduler.add(make_request(make_prompt(3, first=first), max_tokens=200))
    while len(loop.scheduler.running) < 4 or loop.scheduler._behind:
        loop.step()
    long = make_request(make_prompt(60, first=9), max_tokens=1)
    loop.scheduler.add(long)
    num_steps = 0
    while long.request_id not in loop.reasons:
        loop.step()
        num_steps += 1
    assert num_steps <= 60 // 4 + 2


def test_without_speculation_nothing_is_kept() -> None:
    settings = SchedulerConfig(max_model_len=64)
    for speculation in (None, SpeculationConfig()):
        loop = Loop(Scheduler(settings, num_blocks=8, speculation=speculation, now=ManualClock()))
        loop.scheduler.add(make_request(5, max_tokens=9))
        loop.step()
        loop.step()
        (sequence,) = loop.scheduler.running
        assert (sequence.guesser is None) == (speculation is None)
        loop.run()
