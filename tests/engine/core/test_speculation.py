"""Guessing ahead is exact: tokens, log-probabilities and endings are those of not guessing.

Whatever the guesses are, whatever a request wishes, in any company, in any memory; on the native
backend to the last bit. Red when: a guess is in a penalty's or a mask's history that should not be,
a position draws with another's number, a rejected token's KV is read, an end is passed by.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.sim.backend import SimBackend
from octavo_engine.backends.sim.clock import VirtualClock
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.core.engine import Engine
from octavo_engine.core.grammar_queue import GrammarQueue
from octavo_engine.core.offline.llm import LLM
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.grammar.normal import grammar_spec, json_schema_spec, regex_spec
from octavo_engine.grammar.vocabulary import Vocabulary
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.speculation import Speculation
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.tokenization.bytes_tokenizer import EOS, ByteTokenizer
from tests.engine.models.tiny import TinyModel, tiny_model
from tests.fakes.backend import FakeBackend
from tests.fakes.grammar_rig import CHOICE, FIXED
from tests.fakes.guessing import AnswerGuesser
from tests.fakes.requests import make_prompt, make_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend
    from octavo_engine.backends.head_files import HeadsPart
    from octavo_engine.state.outputs import SequenceOutput
    from octavo_engine.state.sequence import Sequence

pytestmark = pytest.mark.slow

NGRAMS = '{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
SPECS = [
    FIXED,
    CHOICE,
    regex_spec(r"(ab|ac){3,30}d"),
    grammar_spec('root ::= "((" root "))" | "x"'),
    json_schema_spec({"type": "array", "items": {"type": "boolean"}}),
    regex_spec("(yes|yellow) indeed", after="=>"),
]


class Generated:
    """All that is told of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] = []
        self.ending: tuple[Any, ...] = ()

    def add(self, output: SequenceOutput) -> None:
        assert not self.ending, "an ending comes once"
        assert not output.logprobs or len(output.logprobs) == len(output.token_ids)
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        if output.finish_reason is not None:
            self.ending = (
                output.finish_reason, output.stop_token_id, output.is_whole, output.error
            )  # fmt: skip

    @property
    def all(self) -> tuple[Any, ...]:
        return self.tokens, self.ending, self.logprobs, self.prompt_logprobs


def make_engine(
    backend: Backend | None,
    *,
    num_blocks: int,
    budget: int = 64,
    caching: bool = True,
    speculative_config: str | None = None,
    kv_offloading_size: float = 0.0,
) -> Engine:
    config = EngineConfig(
        device="sim",
        max_model_len=min(160, 16 * num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=budget, enable_prefix_caching=caching
        ),
        sim=SimConfig(kv_blocks=num_blocks, time_scale=0.0),
        kv_cache_memory_bytes=1 << 20,
        speculative_config=speculative_config,
        kv_offloading_size=kv_offloading_size,
    )
    engine = build_engine(config, backend=backend, now=lambda: 0.0)[0]
    compiler = GrammarCompiler(lambda: Vocabulary(ByteTokenizer(512), vocab_size=512))
    grammars = GrammarQueue(compiler)
    grammars.workers.patience_s = 10.0
    engine.use_grammars(lambda: grammars)
    return engine


def run(engine: Engine, wishes: list[dict[str, Any]], rng: random.Random) -> dict[str, Generated]:
    """In an order and at times of their own, with now and then somebody set back."""
    reported: dict[str, Generated] = {}

    def step() -> None:
        for output in engine.step().outputs:
            reported[output.request_id].add(output)
        engine.scheduler.check_invariants()
        running = engine.scheduler.running
        if running and rng.random() < 0.1:
            engine.scheduler._preempt(rng.choice(running))

    for wish in rng.sample(wishes, len(wishes)):
        engine.add(make_request(eos=(EOS, 9), **wish))
        reported[wish["request_id"]] = Generated()
        for _ in range(rng.randint(0, 3)):
            step()
    while engine.has_work:
        step()
    pool = engine.scheduler.kv.pool
    assert pool.num_free == len(pool.blocks)
    return reported


def check_drafts_change_no_bit(
    make: Callable[[HeadsPart | None], Backend],
    heads: HeadsPart,
    speculative_config: str,
    wishes: list[dict[str, Any]],
    rng: random.Random,
    *,
    pages: int = 1,
) -> None:
    """With heads, in memory and steps of several sizes, as without. `pages`: groups of caches."""
    plain = make_engine(make(None), num_blocks=60 * pages)
    truth = run(plain, wishes, rng)
    plain.close()
    drafted = 0
    for num_blocks, budget, caching in ((10, 16, True), (60, 64, True), (60, 9, False)):
        engine = make_engine(
            make(heads),
            num_blocks=num_blocks * pages,
            budget=budget,
            caching=caching,
            speculative_config=speculative_config,
        )
        for request_id, output in run(engine, wishes, rng).items():
            assert output.all == truth[request_id].all
        drafted += engine.stats().spec_draft_tokens
        engine.close()
    assert drafted > 100


def random_wishes(rng: random.Random, *, vocab: int, with_grammars: bool) -> list[dict[str, Any]]:
    wishes: list[dict[str, Any]] = []
    stem = [token % vocab for token in make_prompt(40)]
    extras: list[dict[str, Any]] = [
        {"logprobs": 3}, {"logprob_token_ids": (98, 9, 40)}, {"ignore_eos": True},
        {"min_tokens": 9, "max_tokens": 30},
        {"prompt_logprobs": 1}, {"logit_bias": {120: 3.0, 9: 2.0}}, {"stop_token_ids": (98, 34)},
        {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"frequency_penalty": 1.0},
        {"presence_penalty": 0.5}, {"repetition_penalty": 1.5},
        {"bad_words_token_ids": ((97, 98), (99,), (100, 101, 102))},
        {"allowed_token_ids": tuple(range(32, 250, 3))},
    ]  # fmt: skip
    for index in range(12):
        wish: dict[str, Any] = {
            "prompt": stem[: rng.randrange(1, 40)],
            "request_id": str(index),
            "seed": rng.randrange(100),
            "temperature": rng.choice([0.0, 1.0, 0.7]),
            "max_tokens": rng.choice([1, 2, 17, 40, 70]),
        }
        for extra in rng.sample(extras, rng.randrange(4)):
            wish |= extra
        if with_grammars and rng.random() < 0.7:
            wish["grammar"] = rng.choice(SPECS)
        wishes.append(wish)
    return wishes


def answers_to(
    engine: Engine, wishes: list[dict[str, Any]], rng: random.Random, truth: dict[str, Generated]
) -> dict[str, Generated]:
    """With guesses that are often what comes."""

    def guesser(sequence: Sequence) -> AnswerGuesser:
        tokens = truth[sequence.request_id].tokens
        return AnswerGuesser(tokens, sequence.num_prompt_tokens, honesty=0.85, rng=rng)

    engine.scheduler._speculation = Speculation(guesser)
    return run(engine, wishes, rng)


def check(
    make_backend: Any, wishes: list[dict[str, Any]], rng: random.Random, *, pages: int = 1
) -> None:
    """`pages`: blocks that 16 tokens take."""
    plain = make_engine(make_backend(), num_blocks=60 * pages)
    truth = run(plain, wishes, rng)
    plain.close()
    num_accepted = 0
    for num_blocks, budget, caching in ((10, 16, True), (60, 64, True), (60, 9, False)):
        engine = make_engine(
            make_backend(), num_blocks=num_blocks * pages, budget=budget, caching=caching
        )
        reported = answers_to(engine, wishes, rng, truth)
        for name, answer in reported.items():
            assert answer.all == truth[name].all
        stats = engine.stats()
        assert stats.generation_tokens == sum(len(answer.tokens) for answer in reported.values())
        num_accepted += stats.spec_accepted_tokens
        engine.close()
    assert num_accepted > 50


@pytest.mark.parametrize("seed", range(5))
def test_it_changes_nothing_on_a_backend_that_knows_the_truth(seed: int) -> None:
    """Grammars too; any slot that is read and should not be shows."""
    rng = random.Random(seed)
    check(
        lambda: FakeBackend(60, 512, peak=0.5),
        random_wishes(rng, vocab=512, with_grammars=True),
        rng,
    )


@pytest.mark.parametrize("windows", [(24,), (None, 24, 40)])
def test_it_changes_nothing_where_layers_have_windows(windows: tuple[int | None, ...]) -> None:
    rng = random.Random(7)
    num_blocks = 60 * len(windows)
    check(
        lambda: FakeBackend(num_blocks, 512, peak=0.5, windows=windows),
        random_wishes(rng, vocab=512, with_grammars=True),
        rng,
        pages=len(windows),
    )


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


@pytest.mark.parametrize("seed", range(4))
def test_it_changes_no_bit_of_a_native_model(seed: int, model: TinyModel) -> None:
    rng = random.Random(seed)

    def backend() -> NativeBackend:
        return NativeBackend(
            ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=160, num_threads=1
        )

    check(backend, random_wishes(rng, vocab=256, with_grammars=False), rng)


@pytest.mark.parametrize("seed", range(2))
def test_it_changes_nothing_in_the_simulator(seed: int) -> None:
    rng = random.Random(seed)
    check(lambda: None, random_wishes(rng, vocab=256, with_grammars=True), rng)


def test_a_failure_comes_where_it_would_have_come() -> None:
    """The request fails at the same token, with what came before it told; a guess that would fail
    harms nobody."""
    results = []
    for guesses_ahead in (False, True):
        backend = FakeBackend(64)
        engine = make_engine(backend, num_blocks=64)
        truth = backend.continuation(make_prompt(9), 30)
        backend.fail_after([*make_prompt(9), *truth[:11]])  # its turn comes
        backend.fail_after([*make_prompt(9), *truth[:4], 255])  # its turn does not
        lie = [*truth[:4], 255, *truth[5:]]
        if guesses_ahead:
            engine.scheduler._speculation = Speculation(partial(_guesser, lie))
        engine.add(make_request(9, request_id="a", max_tokens=30, temperature=0.0))
        reported = Generated()
        while engine.has_work:
            for output in engine.step().outputs:
                reported.add(output)
            engine.scheduler.check_invariants()
        results.append(reported.all)
        assert reported.tokens == truth[:11] and reported.ending[0] == "error"
        assert (engine.stats().spec_accepted_tokens > 3) == guesses_ahead
        engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("moment", range(6))
def test_an_abort_while_guesses_are_computed_gives_all_back(moment: int) -> None:
    backend = FakeBackend(64)
    engine = make_engine(backend, num_blocks=64)
    truth = backend.continuation(make_prompt(9), 40)
    engine.scheduler._speculation = Speculation(lambda _: AnswerGuesser(truth, 9, least=5))
    request = make_request(9, max_tokens=40, temperature=0.0)
    engine.add(request)
    for _ in range(moment):
        engine.step()

    def abort(step: object) -> None:
        engine.abort(request.request_id)

    backend.on_execute = abort
    assert not engine.step().outputs
    backend.on_execute = None
    engine.scheduler.check_invariants()
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    engine.close()


def test_a_late_mask_loses_its_guesses_and_nothing_else() -> None:
    truth = run(
        make_engine(FakeBackend(64, peak=0.5), num_blocks=64),
        [{"request_id": "a", "grammar": SPECS[2], "max_tokens": 60}],
        random.Random(0),
    )
    engine = make_engine(FakeBackend(64, peak=0.5), num_blocks=64)
    engine.scheduler._speculation = Speculation(
        lambda sequence: AnswerGuesser(truth["a"].tokens, sequence.num_prompt_tokens, least=5)
    )
    assert engine._make_grammars is not None
    grammars = engine._make_grammars()
    grammars.workers.patience_s = 0.0
    engine.add(make_request(5, request_id="a", grammar=SPECS[2], max_tokens=60, eos=(EOS, 9)))
    reported = Generated()
    while engine.has_work:
        for output in engine.step().outputs:
            reported.add(output)
        engine.scheduler.check_invariants()
    assert reported.tokens == truth["a"].tokens and reported.ending == truth["a"].ending
    engine.close()


def _guesser(answer: list[int], sequence: Sequence) -> AnswerGuesser:
    return AnswerGuesser(answer, sequence.num_prompt_tokens, least=4)


# -- n-grams --------------------------------------------------------------------------------------


def test_a_real_model_that_repeats_itself_is_guessed_ahead(monkeypatch: Any) -> None:
    """It counts, surely and by chance. More than half of the guesses are right, and the answers are
    those of no speculation, with their log-probabilities."""
    monkeypatch.setattr(StepTimeModel, "observe", lambda *_: None)  # whatever this machine's times
    prompt = "one two three four five six seven eight nine ten " * 4
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.4, max_tokens=30, seed=5, n=2, stop=("two thr",)),
    ]  # fmt: skip
    results: list[Any] = []
    num_steps: list[int] = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}):
        with LLM(
            "demo://smollm2", max_model_len=512, kv_cache_memory_bytes=1 << 26,
            speculative_config=config,
        ) as llm:  # fmt: skip
            outputs = llm.generate([prompt, prompt], params, use_tqdm=False)
            results.append([o.outputs for o in outputs])
            stats = llm._engine.stats()  # type: ignore[attr-defined]  # a look behind the curtain
            num_steps.append(stats.steps)
    assert results[0] == results[1]
    assert stats.spec_accepted_tokens > 0.5 * stats.spec_draft_tokens > 10
    assert num_steps[1] < 0.75 * num_steps[0]


def test_an_answer_that_was_given_before_is_guessed_ahead(monkeypatch: Any) -> None:
    """To a request of the same tenant; the answers are those of no speculation."""
    monkeypatch.setattr(StepTimeModel, "observe", lambda *_: None)  # whatever this machine's times
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    results: list[Any] = []
    for config in (None, {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0}):
        with LLM(
            "demo://smollm2", max_model_len=512, kv_cache_memory_bytes=1 << 26,
            speculative_config=config,
        ) as llm:  # fmt: skip
            engine = llm._engine
            assert isinstance(engine, Engine)
            accepted, answers = [0], []
            for _ in range(2):
                (answer,) = llm.generate(["The sea is"], params, use_tqdm=False)
                answers.append(answer.outputs)
                accepted.append(engine.stats().spec_accepted_tokens)
            assert answers[0] == answers[1]
            results.append(answers[0])
    assert results[0] == results[1]
    assert accepted[2] - accepted[1] > 25 > accepted[1]


def test_the_simulator_is_guessed_ahead_in_modelled_time() -> None:
    """Its words come again; a step costs what its rows cost, and fewer are needed."""
    results, seconds = [], []
    for config in (None, NGRAMS):
        settings = EngineConfig(
            device="sim", max_model_len=1024, speculative_config=config,
            sim=SimConfig(step_base_ms=10.0, decode_token_ms=0.5, prefill_token_ms=0.1),
        )  # fmt: skip
        clock = VirtualClock()
        engine = build_engine(settings, backend=SimBackend(settings, clock), now=clock.now)[0]
        started = clock.now()
        engine.add(make_request(5, request_id="a", max_tokens=900, seed=3))
        reported = Generated()
        while engine.has_work:
            for output in engine.step().outputs:
                reported.add(output)
        results.append(reported.all)
        seconds.append(clock.now() - started)
        engine.close()
    assert results[0] == results[1]
    assert seconds[1] < 0.7 * seconds[0]
