"""Steps on several stages at once: the answers are those of an engine that waits for each step."""

from __future__ import annotations

import dataclasses
import random

import pytest

from octavo_engine.core.build import build_engine
from octavo_engine.errors import ConfigError
from octavo_engine.grammar.normal import choice_spec
from octavo_engine.state.request import BACKGROUND
from tests.engine.core.test_ahead import CONFIG, WAITING, Answers, make_engine, odd_answers
from tests.fakes.backend import FakeBackend
from tests.fakes.launching import PipelinedBackend
from tests.fakes.requests import make_prompt, make_request

pytestmark = pytest.mark.slow

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'


def test_sequences_that_decode_are_dealt_out_over_the_stages() -> None:
    backend = PipelinedBackend(64, 3)
    engine, log = make_engine(backend)
    for number in range(6):
        engine.add(make_request(make_prompt(5, first=number), max_tokens=30))
    answers = Answers()
    sizes = []
    for _ in range(30):
        answers.step(engine)
        assert engine._ahead is not None
        sizes += [len(flight.batch.sequences) for flight in list(engine._ahead._flights)[-1:]]
    assert sizes[-9:] == [2] * 9
    assert backend.most_under_way == 3
    waits = [int(entry.split()[1]) for entry in log if entry.startswith("wait")]
    assert waits == sorted(waits)
    answers.finish(engine)
    for request_id, tokens in answers.tokens.items():
        assert len(tokens) == 30, request_id


def test_one_sequence_is_in_one_step_at_a_time() -> None:
    backend = PipelinedBackend(64, 2)
    engine, _ = make_engine(backend)
    request = make_request(make_prompt(20), max_tokens=9)
    engine.add(request)
    answers = Answers()
    answers.finish(engine)
    assert answers.tokens[request.request_id] == backend.continuation(make_prompt(20), 9)


def test_chunks_of_one_prompt_follow_each_other_at_once() -> None:
    backend = PipelinedBackend(64, 3)
    engine, log = make_engine(backend)
    request = make_request(make_prompt(140), max_tokens=2)
    engine.add(request)
    answers = Answers()
    answers.finish(engine)
    assert [entry.split()[0] for entry in log[:4]] == ["launch", "launch", "launch", "wait"]
    assert answers.tokens[request.request_id] == backend.continuation(make_prompt(140), 2)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("speculative_config", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize(
    ("seed", "windows", "num_blocks"),
    [(0, (None,), 12), (1, (None,), 12), (2, (80,), 16), (3, (None, 24, 40), 44)],
)
def test_answers_are_those_of_an_engine_that_waits(
    seed: int,
    windows: tuple[int | None, ...],
    num_blocks: int,
    speculative_config: str | None,
    num_stages: int,
) -> None:
    """Of everything beside everything, in so little memory that sequences are preempted."""
    found = []
    for config in (CONFIG, WAITING):
        config = dataclasses.replace(config, speculative_config=speculative_config)
        rng = random.Random(seed)
        stems = [[rng.randrange(512) for _ in range(60)] for _ in range(3)]
        backend = PipelinedBackend(num_blocks, num_stages, peak=0.0, windows=windows)
        engine, _ = make_engine(backend, config)
        answers = odd_answers(engine, rng, stems)
        stats = engine.stats()
        assert stats.prefix_hits > 0
        if windows == (None,):
            assert stats.preemptions > 0  # the hard cases did occur
        if config.async_scheduling is None:
            assert 2 <= backend.most_under_way <= num_stages
            assert not any(out[0] == "error" for out in answers.endings.values())
        else:
            assert backend.most_under_way <= 1
        assert stats.kv_blocks_used == 0
        found.append((answers.tokens, answers.details, answers.endings))
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(3))
def test_aborts_and_suspensions_change_no_other_answer(seed: int) -> None:
    rng = random.Random(seed)
    backend = PipelinedBackend(30, 3)
    engine, _ = make_engine(backend)
    answers, truths, aborted = Answers(), {}, set()
    for number in range(40):
        prompt = [rng.randrange(512) for _ in range(rng.choice([1, 30, 70]))]
        priority = rng.choice([0, 0, BACKGROUND])
        request = make_request(prompt, request_id=f"r{number}", max_tokens=20, priority=priority)
        truths[request.request_id] = backend.continuation(prompt, 20)
        engine.add(request)
        for _ in range(rng.randint(0, 4)):
            answers.step(engine)
            engine.suspend(f"r{rng.randint(0, number)}", on=rng.random() < 0.6)
            engine.scheduler.check_invariants()
        victim = f"r{rng.randint(0, number)}"
        if rng.random() < 0.4 and engine.abort(victim) is not None:
            aborted.add(victim)
    for name in truths:
        engine.suspend(name, on=False)
    answers.finish(engine)
    assert len(aborted) > 5
    for name, truth in truths.items():
        tokens = answers.tokens.get(name, [])
        assert tokens == (truth[: len(tokens)] if name in aborted else truth)
    assert engine.stats().kv_blocks_used == 0


def test_what_a_host_must_know_is_known() -> None:
    """Such sequences need no care: they are in no other step."""
    found = []
    for backend in (FakeBackend(64), PipelinedBackend(64, 2)):
        engine, _ = make_engine(backend)
        for number in range(4):
            grammar = choice_spec(["yes", "no"]) if number % 2 else None
            engine.add(
                make_request(make_prompt(9), request_id=f"r{number}", max_tokens=6, grammar=grammar)
            )
        answers = Answers()
        answers.finish(engine)
        found.append((answers.tokens, answers.endings))
    assert found[0] == found[1]
    assert isinstance(backend, PipelinedBackend)
    assert backend.most_under_way == 2


@pytest.mark.parametrize("is_launch", [True, False])
def test_a_step_that_fails_ends_only_what_was_under_way(is_launch: bool) -> None:
    backend = PipelinedBackend(64, 2)
    engine, _ = make_engine(backend)
    for number in range(4):
        engine.add(
            make_request(make_prompt(9, first=number), request_id=f"r{number}", max_tokens=9)
        )
    answers = Answers()
    for _ in range(4):
        answers.step(engine)

    def fail(number: int) -> None:
        backend.on_launch = backend.on_wait = None
        backend._rows.clear()
        raise ValueError("no such step")

    if is_launch:
        backend.on_launch = fail
    else:
        backend.on_wait = fail
    answers.step(engine)
    backend._queue.clear()
    assert {ending[0] for ending in answers.endings.values()} == {"error"}
    follower = make_request(make_prompt(20, first=77), request_id="after", max_tokens=5)
    engine.add(follower)
    answers.finish(engine)
    assert answers.tokens["after"] == backend.continuation(follower.prompt_token_ids, 5)
    assert engine.stats().kv_blocks_used == 0


def test_speculation_does_not_hold_up_a_pipeline_but_may_not_be_planned_ahead_by_wish() -> None:
    backend = PipelinedBackend(64, 2)
    engine, _ = build_engine(dataclasses.replace(CONFIG, speculative_config=NGRAM), backend=backend)
    assert engine._ahead is not None
    with pytest.raises(ConfigError, match="--async-scheduling plans before tokens are known"):
        dataclasses.replace(CONFIG, speculative_config=NGRAM, async_scheduling=True)
