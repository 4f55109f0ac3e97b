"""Steps launched one ahead: the answers are those of an engine that waits for each step."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.errors import ConfigError, OctavoError
from octavo_engine.grammar.normal import choice_spec
from octavo_engine.state.request import BACKGROUND
from tests.fakes.backend import FakeBackend
from tests.fakes.clock import ManualClock
from tests.fakes.launching import LaunchingBackend
from tests.fakes.requests import make_prompt, make_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.core.engine import Engine
    from octavo_engine.core.process.heartbeat import HeartbeatState
    from octavo_engine.state.request import EngineRequest

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(
    device="sim",
    max_model_len=160,
    # However slow a machine's steps are: it refuses nothing.
    scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, queue_timeout_s=math.inf),
    sim=SimConfig(kv_blocks=64),
)
WAITING = dataclasses.replace(CONFIG, async_scheduling=False)


def make_engine(
    backend: FakeBackend, config: EngineConfig = CONFIG, **options: Any
) -> tuple[Engine, list[str]]:
    """The engine, and what its host does from now on."""
    blocks = SimConfig(kv_blocks=backend.num_blocks)
    engine, _ = build_engine(dataclasses.replace(config, sim=blocks), backend=backend, **options)
    if not isinstance(backend, LaunchingBackend):
        return engine, []
    backend.log.clear()
    backend.num_awaited = 0
    return engine, backend.log


class Answers:
    """What was told of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.details: dict[str, list[Any]] = {}
        self.endings: dict[str, tuple[Any, ...]] = {}

    def step(self, engine: Engine) -> None:
        for out in engine.step().outputs:
            assert out.request_id not in self.endings, "an ending comes once, and last"
            self.tokens.setdefault(out.request_id, []).extend(out.token_ids)
            details = self.details.setdefault(out.request_id, [])
            details += [*out.logprobs, *out.prompt_logprobs]
            if out.finish_reason is not None:
                self.endings[out.request_id] = (out.finish_reason, out.stop_token_id)
        engine.scheduler.check_invariants()

    def finish(self, engine: Engine) -> None:
        for _ in range(3000):
            if not engine.has_work:
                return
            self.step(engine)
        raise AssertionError("the work does not come to an end")


def test_the_next_step_is_launched_before_the_last_is_waited_for() -> None:
    backend = LaunchingBackend(64)
    engine, log = make_engine(backend)
    first = backend.num_launches
    requests = [make_request(make_prompt(60, first=i), max_tokens=5) for i in range(2)]
    for request in requests:
        engine.add(request)
    answers = Answers()
    answers.finish(engine)
    numbers = range(first, backend.num_launches)
    wanted = [f"launch {numbers[0]}"]
    for number in numbers[1:]:
        wanted += [f"launch {number}", f"wait {number - 1}"]
    assert log == [*wanted, f"wait {numbers[-1]}"]
    for request in requests:
        truth = backend.continuation(request.prompt_token_ids, 5)
        assert answers.tokens[request.request_id] == truth


def test_a_length_that_is_known_is_not_overrun() -> None:
    backends = LaunchingBackend(64), FakeBackend(64)
    for backend, config in zip(backends, (CONFIG, WAITING), strict=True):
        engine, _ = make_engine(backend, config)
        for length in (1, 2, 17):
            engine.add(make_request(make_prompt(20, first=length), max_tokens=length))
        Answers().finish(engine)
    assert backends[0].num_tokens == backends[1].num_tokens
    assert backends[0].num_steps == backends[1].num_steps


def test_a_stop_token_is_found_one_step_late_and_what_follows_it_dropped() -> None:
    backend = LaunchingBackend(64)
    engine, _ = make_engine(backend)
    prompt = make_prompt(60)
    truth = backend.continuation(prompt, 9)
    stopped = make_request(prompt, max_tokens=9, stop_token_ids=(truth[4],))
    engine.add(stopped)
    before = backend.num_tokens
    answers = Answers()
    while stopped.request_id not in answers.endings:
        answers.step(engine)
    # Its row and blocks are free while a step still computes for it; somebody else takes them, with
    # a prompt of several chunks, so that a token noted too late would fall into a later one.
    assert engine.has_work
    follower = make_request(make_prompt(100, first=9), max_tokens=9)
    engine.add(follower)
    answers.finish(engine)
    assert answers.tokens[stopped.request_id] == truth[:5]
    assert answers.endings[stopped.request_id] == ("stop", truth[4])
    assert answers.tokens[follower.request_id] == backend.continuation(follower.prompt_token_ids, 9)
    assert backend.num_tokens - before == (60 + 5) + (100 + 8)  # one for nothing


def odd_request(rng: random.Random, name: str, stems: list[list[int]]) -> EngineRequest:
    """Of any kind: most can be launched ahead, some cannot."""
    prompt = rng.choice(stems)[: rng.randint(1, 60)]
    prompt = prompt + [rng.randrange(512) for _ in range(rng.choice([0, 0, 1, 20]))]
    wishes: dict[str, Any] = rng.choice(
        [
            {}, {}, {}, {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 3},
            {"logprob_token_ids": (9, 1, 5), "top_k": 20}, {"top_p": 0.8, "min_p": 0.01},
            {"stop_token_ids": tuple(range(0, 512, 9)), "ignore_eos": True},
            {"stop_token_ids": tuple(range(0, 512, 5)), "max_tokens": 12, "min_tokens": 6},
            {"repetition_penalty": 1.3}, {"presence_penalty": 1.0, "frequency_penalty": 0.5},
            {"bad_words_token_ids": ((9,), (1, 2))},
            {"prompt_logprobs": 2}, {"logit_bias": {7: 5.0}}, {"allowed_token_ids": (1, 2, 3)},
        ]
    )  # fmt: skip
    length = {"max_tokens": rng.choice([1, 2, 12, 70, 70])}
    return make_request(
        prompt, request_id=name, seed=rng.randrange(99), eos=(3, 44), **length | wishes
    )


def odd_answers(engine: Engine, rng: random.Random, stems: list[list[int]]) -> Answers:
    """Of 24 odd requests, which come while others run."""
    answers = Answers()
    for number in range(24):
        engine.add(odd_request(rng, f"r{number}", stems))
        for _ in range(rng.randint(0, 6)):
            answers.step(engine)
    answers.finish(engine)
    return answers


@pytest.mark.parametrize(
    ("seed", "windows", "num_blocks"),
    [
        (0, (None,), 12), (1, (None,), 12), (2, (None,), 12), (3, (80,), 11),
        (4, (None, 24, 40), 36),
    ],
)  # fmt: skip
def test_answers_are_those_of_an_engine_that_waits(
    seed: int, windows: tuple[int | None, ...], num_blocks: int
) -> None:
    """Of everything in company, in so little memory that sequences are preempted."""
    reported = []
    for config in (CONFIG, WAITING):
        rng = random.Random(seed)
        stems = [[rng.randrange(512) for _ in range(60)] for _ in range(3)]
        backend = LaunchingBackend(num_blocks, peak=0.0, windows=windows)
        engine, log = make_engine(backend, config)
        answers = odd_answers(engine, rng, stems)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0  # the hard cases did occur
        assert (backend.num_awaited > 100) == (config is CONFIG)
        assert bool(log) == (config is CONFIG)
        reported.append((answers.tokens, answers.details, answers.endings))
    assert reported[0] == reported[1]


def add_many(
    engine: Engine, backend: LaunchingBackend, rng: random.Random
) -> Iterator[tuple[int, list[int]]]:
    """Forty requests, one after the other: its number, and its answer to come."""
    for number in range(40):
        prompt = [rng.randrange(512) for _ in range(rng.choice([1, 30, 70]))]
        engine.add(make_request(prompt, request_id=f"r{number}", max_tokens=20))
        yield number, backend.continuation(prompt, 20)


@pytest.mark.parametrize("seed", range(3))
def test_an_abort_changes_no_other_answer(seed: int) -> None:
    rng = random.Random(seed)
    backend = LaunchingBackend(30)
    engine, _ = make_engine(backend)
    answers, truths, aborted = Answers(), {}, set()
    for number, truth in add_many(engine, backend, rng):
        truths[f"r{number}"] = truth
        for _ in range(rng.randint(0, 4)):
            answers.step(engine)
        victim = f"r{rng.randint(0, number)}"
        if rng.random() < 0.4 and engine.abort(victim) is not None:
            aborted.add(victim)
            engine.scheduler.check_invariants()
    answers.finish(engine)
    assert 5 < len(aborted) < 35
    for name, truth in truths.items():
        tokens = answers.tokens.get(name, [])
        assert tokens == (truth[: len(tokens)] if name in aborted else truth)
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_suspended_sequence_continues_where_it_was(seed: int) -> None:
    rng = random.Random(seed)
    backend = LaunchingBackend(30)
    engine, _ = make_engine(backend)
    answers, truths = Answers(), {}
    for number, truth in add_many(engine, backend, rng):
        truths[f"r{number}"] = truth
        for _ in range(rng.randint(0, 4)):
            answers.step(engine)
            engine.suspend(f"r{rng.randint(0, number)}", on=rng.random() < 0.6)
            engine.scheduler.check_invariants()
    assert engine.scheduler.suspended
    for name in truths:
        engine.suspend(name, on=False)
    answers.finish(engine)
    assert answers.tokens == truths
    assert engine.stats().kv_blocks_used == 0


def test_an_abort_of_the_last_one_leaves_a_step_to_be_taken_in() -> None:
    backend = LaunchingBackend(64)
    engine, log = make_engine(backend)
    request = make_request(9, max_tokens=50)
    engine.add(request)
    engine.step()
    engine.step()
    assert engine.abort(request.request_id) is not None
    assert engine.has_work  # the step that computes for nobody
    assert not engine.step().outputs and not engine.last_step_was_empty
    assert not engine.has_work and log[-1].startswith("wait")
    engine.scheduler.check_invariants()


def test_a_deadline_passes_while_its_step_is_under_way() -> None:
    clock = ManualClock()
    engine, _ = make_engine(LaunchingBackend(64), now=clock)
    request = make_request(9, max_tokens=50, deadline_at=clock() + 5.0)
    engine.add(request)
    answers = Answers()
    answers.step(engine)
    answers.step(engine)
    clock.advance(6.0)
    answers.finish(engine)
    assert answers.endings == {request.request_id: ("deadline", None)}


@pytest.mark.parametrize(
    "wish",
    [
        {"repetition_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5},
        {"logit_bias": {7: 2.0}}, {"allowed_token_ids": tuple(range(99))}, {"min_tokens": 3},
        {"bad_words_token_ids": ((4,), (5,))},
    ],
    ids=lambda wish: next(iter(wish)),
)  # fmt: skip
def test_wishes_that_the_device_can_grant_alone_are_launched_ahead(wish: dict[str, Any]) -> None:
    reported = []
    for config in (CONFIG, WAITING):
        backend = LaunchingBackend(64, peak=0.0)
        engine, _ = make_engine(backend, config)
        engine.add(make_request(9, request_id="r", max_tokens=6, seed=4, eos=(3,), **wish))
        answers = Answers()
        answers.finish(engine)
        assert (backend.num_awaited == 5) == (config is CONFIG)
        reported.append(answers.tokens)
    assert reported[0] == reported[1]


@pytest.mark.parametrize(
    "wish", [{"bad_words_token_ids": ((4, 5),)}, {"prompt_logprobs": 1}], ids=["words", "scores"]
)
def test_rows_that_the_host_must_touch_wait_for_their_tokens(wish: dict[str, Any]) -> None:
    backend = LaunchingBackend(64)
    engine, log = make_engine(backend)
    request = make_request(9, max_tokens=6, **wish)
    engine.add(request)
    Answers().finish(engine)
    kinds = [entry.split()[0] for entry in log]
    assert kinds == ["launch", "wait"] * 6
    assert backend.num_awaited == 0


def test_grammars_hold_no_other_request_back_for_good() -> None:
    reported = []
    for config in (CONFIG, WAITING):
        backend = LaunchingBackend(64)
        engine, log = make_engine(backend, config)
        free = make_request(12, request_id="free", max_tokens=300)
        choices = choice_spec(["yes and so on", "no", "perhaps"])
        engine.add(free)
        engine.add(make_request(7, request_id="guided", max_tokens=40, grammar=choices, eos=(256,)))
        answers = Answers()
        answers.finish(engine)
        reported.append((answers.tokens, answers.endings))
        if config is CONFIG:  # once the guided one is gone, steps run ahead again
            assert [entry.split()[0] for entry in log[-5:]] == [
                "launch", "wait", "launch", "wait", "wait",
            ]  # fmt: skip
    assert reported[0] == reported[1]
    assert bytes(reported[0][0]["guided"]).decode() in ("yes and so on", "no", "perhaps")


def test_not_a_number_fails_its_request_alone() -> None:
    backend = LaunchingBackend(64)
    engine, _ = make_engine(backend)
    sick, well = (make_request(make_prompt(9, first=i), max_tokens=20) for i in range(2))
    truth = backend.continuation(sick.prompt_token_ids, 20)
    backend.fail_after([*sick.prompt_token_ids, *truth[:7]])
    engine.add(sick)
    engine.add(well)
    answers = Answers()
    answers.finish(engine)
    assert answers.tokens[sick.request_id] == truth[:7]
    assert answers.endings == {sick.request_id: ("error", None), well.request_id: ("length", None)}
    assert answers.tokens[well.request_id] == backend.continuation(well.prompt_token_ids, 20)
    engine.add(make_request(sick.prompt_token_ids, request_id="again", max_tokens=7))
    answers.finish(engine)
    assert answers.tokens["again"] == truth[:7]  # nothing spoiled was cached


@pytest.mark.parametrize("where", ["on_launch", "on_wait"])
def test_a_failing_step_fails_what_it_computed_and_the_engine_goes_on(where: str) -> None:
    backend = LaunchingBackend(64)
    engine, _ = make_engine(backend)
    first = make_request(9, max_tokens=30)
    engine.add(first)
    answers = Answers()
    for _ in range(4):
        answers.step(engine)
    known = len(answers.tokens[first.request_id])

    def explode(number: int) -> None:
        raise RuntimeError("the kernel said no")

    setattr(backend, where, explode)
    outputs = engine.step().outputs
    setattr(backend, where, None)
    assert outputs[-1].error == "the engine failed to compute a step: RuntimeError"
    reported = [token for output in outputs for token in output.token_ids]
    assert len(reported) == (where == "on_launch")  # the step before was not to blame
    truth = backend.continuation(first.prompt_token_ids, 30)
    assert answers.tokens[first.request_id] + reported == truth[: known + len(reported)]
    engine.scheduler.check_invariants()
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    second = make_request(first.prompt_token_ids, max_tokens=30)
    engine.add(second)
    answers.finish(engine)
    assert answers.tokens[second.request_id] == truth


@pytest.mark.parametrize("where", ["on_launch", "on_wait"])
def test_three_failing_steps_in_a_row_are_no_requests_fault(where: str) -> None:
    backend = LaunchingBackend(64)
    engine, _ = make_engine(backend)

    def explode(number: int) -> None:
        raise RuntimeError("sticky")

    setattr(backend, where, explode)
    with pytest.raises(OctavoError, match=r"3 steps in a row failed.*RuntimeError: sticky"):
        for _ in range(9):
            engine.add(make_request(5))
            engine.step()


def test_failing_to_plan_ends_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(LaunchingBackend(64))
    names = {"a", "b"}
    for name in names:
        engine.add(make_request(5, request_id=name, max_tokens=9))
    engine.step()

    def explode() -> None:
        raise RuntimeError("books do not balance")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", explode)
        outputs = engine.step().outputs
    assert {o.request_id for o in outputs if o.finish_reason == "error"} == names
    assert not engine.has_work
    engine.scheduler.check_invariants()


def test_memory_that_is_short_is_taken_only_from_who_computes_nothing() -> None:
    """Two that fit alone and not together: the plan that preempts one waits for the step's end."""
    backend = LaunchingBackend(8)
    engine, log = make_engine(backend, dataclasses.replace(CONFIG, max_model_len=128))
    requests = [make_request(make_prompt(10, first=i), max_tokens=60) for i in range(2)]
    for request in requests:
        engine.add(request)
    answers = Answers()
    answers.finish(engine)
    assert engine.stats().preemptions > 0
    for request in requests:
        truth = backend.continuation(request.prompt_token_ids, 60)
        assert answers.tokens[request.request_id] == truth
    kinds = "".join(entry[0] for entry in log)
    assert "llw" in kinds and "lwlw" in kinds


def test_a_deadline_takes_no_memory_from_who_is_under_way() -> None:
    """Who stood first in line expires, so the one behind, blocked for memory, may claim that of a
    sequence in no hurry: it is taken once its step is reported, and nothing false is published."""
    clock = ManualClock()
    backend = LaunchingBackend(20)
    backend.on_wait = lambda _: clock.advance(0.01)
    engine, _ = make_engine(
        backend,
        dataclasses.replace(
            CONFIG,
            max_model_len=280,
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=12),
        ),
        now=clock,
    )
    answers = Answers()
    batch = make_request(20, max_tokens=60, priority=BACKGROUND)
    engine.add(batch)
    for _ in range(6):
        answers.step(engine)
    stem = make_prompt(180, first=9)
    owner = make_request(stem, max_tokens=3)
    engine.add(owner)
    answers.step(engine)
    waits = make_request(stem, max_tokens=3, deadline_at=clock() + 60.0)  # for its prefix
    blocked = make_request(make_prompt(160, first=5), max_tokens=3)
    engine.add(waits)
    engine.add(blocked)
    sequences = engine.scheduler.sequences
    in_batch, first, second = (sequences[r.request_id] for r in (batch, waits, blocked))
    for _ in range(12):
        answers.step(engine)
        if in_batch.num_ahead and first.blocked_at is None and second.blocked_at is not None:
            break
    else:
        raise AssertionError("the batch is never under way while its memory is wanted")
    clock.advance(61.0)
    answers.step(engine)
    assert answers.endings.pop(waits.request_id) == ("deadline", None)
    answers.finish(engine)
    assert engine.stats().preemptions > 0
    for request in (batch, owner, blocked):
        truth = backend.continuation(request.prompt_token_ids, request.params.max_tokens or 0)
        assert answers.tokens[request.request_id] == truth


def test_where_it_is_on() -> None:
    speculating = dataclasses.replace(CONFIG, speculative_config='{"method": "ngram"}')
    slow = LaunchingBackend(64)
    slow.launch_waits = True
    for backend, config, is_ahead in (
        (LaunchingBackend(64), CONFIG, True),
        (LaunchingBackend(64), WAITING, False),
        (LaunchingBackend(64), speculating, False),
        (slow, CONFIG, False),
        (slow, dataclasses.replace(CONFIG, async_scheduling=True), True),
        (FakeBackend(64), CONFIG, False),
    ):
        backend.limits = None
        build_engine(config, backend=backend)
        assert bool(getattr(backend, "num_launches", 0)) == is_ahead
    requested = dataclasses.replace(CONFIG, async_scheduling=True)
    with pytest.raises(ConfigError, match="--async-scheduling is of --device cuda"):
        build_engine(requested, backend=FakeBackend(64))
    with pytest.raises(ConfigError, match="--speculative-config guesses"):
        dataclasses.replace(speculating, async_scheduling=True)


def test_a_launch_that_waits_is_expected_to_take_its_steps_time() -> None:
    """A device whose kernels look at sizes on the host computes while it is launched."""
    backend, clock = LaunchingBackend(64), ManualClock()
    engine, _ = make_engine(backend, now=clock)
    pulses: list[HeartbeatState] = []

    def on_launch(_: int) -> None:
        clock.advance(0.8)
        pulses.append(engine.heartbeat.pulse())

    backend.on_launch = on_launch
    for i in range(2):
        engine.add(make_request(make_prompt(40, first=i), max_tokens=30))
    while engine.has_work:
        engine.heartbeat.begin()
        engine.step()
        engine.heartbeat.end()
    assert all(pulse.expected_s > 0.0 for pulse in pulses[5:])
    # Two steps at most are under way, each of them like those before.
    assert 0.7 < pulses[-1].expected_s < 3 * 0.8


def test_what_a_launch_compiles_is_no_missing_progress() -> None:
    backend, clock = LaunchingBackend(64), ManualClock()
    engine, _ = make_engine(backend, now=clock)
    pulses: list[HeartbeatState] = []

    def on_launch(number: int) -> None:
        engine.heartbeat.compile_begins()
        clock.advance(60.0)
        pulses.append(engine.heartbeat.pulse())
        engine.heartbeat.compile_ends()

    backend.on_launch = on_launch
    engine.add(make_request(make_prompt(40), max_tokens=3))
    engine.heartbeat.begin()
    engine.step()
    assert [pulse.is_stalled(3.0) for pulse in (*pulses, engine.heartbeat.pulse())] == [False] * 2
