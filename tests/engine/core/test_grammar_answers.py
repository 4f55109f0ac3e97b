"""Structured answers of a real model: whole, valid, and the same however they were computed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.async_engine import AsyncEngine
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.normal import (
    choice_spec,
    grammar_spec,
    json_object_spec,
    json_schema_spec,
    regex_spec,
)
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.grammar.validity import is_valid
from tests.fakes.generate import generate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.state.grammar import GrammarSpec

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
}
PROMPT = "Q: Describe Alice, who is 31 and has a cat, in JSON.\nA: "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    scheduler = SchedulerConfig(max_num_seqs=8)
    config = EngineConfig(device="cpu", kv_cache_memory_bytes=2**25, scheduler=scheduler)
    with LLM.from_config(config) as made:
        yield made


def ask(llm: LLM, spec: GrammarSpec | None, **params: Any) -> Any:
    params.setdefault("max_tokens", 150)
    given = SamplingParams(grammar=spec, **params)
    return llm.generate(PROMPT, given, use_tqdm=False)[0].outputs


@pytest.mark.slow
def test_json_is_valid_whatever_the_temperature(llm: LLM) -> None:
    requested = [(heat, spaces) for heat in (0.0, 1.0, 2.0) for spaces in (True, False)]
    params = [
        SamplingParams(
            grammar=json_schema_spec(PERSON, strict=True, any_whitespace=spaces), n=3, seed=5,
            temperature=heat, max_tokens=150,
        )
        for heat, spaces in requested
    ]  # fmt: skip
    found = llm.generate([PROMPT] * len(requested), params, use_tqdm=False)
    for (_, spaces), reported in zip(requested, found, strict=True):
        ended = [a for a in reported.outputs if a.finish_reason == "stop"]
        assert len(ended) >= 2, "white space may use up max_tokens, seldom"
        for answer in ended:
            assert is_valid(json.loads(answer.text), PERSON), answer.text
            assert spaces or not re.search(r"[:,] |\n", re.sub(r'"[^"]*"', "", answer.text))


def test_other_languages(llm: LLM) -> None:
    for spec, pattern in (
        (regex_spec(r"\d{3}-\d{4}"), r"[0-9]{3}-[0-9]{4}"),
        (choice_spec(["positive", "negative"]), "positive|negative"),
        (grammar_spec('root ::= ("ab" | "c"){2,4} "."'), r"(ab|c){2,4}\."),
    ):
        (answer,) = ask(llm, spec, temperature=1.5, seed=2)
        assert answer.finish_reason == "stop" and re.fullmatch(pattern, answer.text)


def test_an_object_that_may_go_on_is_a_beginning_when_cut(llm: LLM) -> None:
    answers = ask(llm, json_object_spec(), max_tokens=10, temperature=1.0, seed=1, n=8)
    cut = [answer.text for answer in answers if answer.finish_reason == "length"]
    assert cut and all(text.startswith("{") for text in cut)
    for answer in answers:
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_asking_for_logprobs_changes_nothing_and_they_are_raw(llm: LLM) -> None:
    spec = json_schema_spec(PERSON, strict=True, any_whitespace=False)
    (plain,) = ask(llm, spec, temperature=0.0)
    (scored,) = ask(llm, spec, temperature=0.0, logprobs=1)
    assert scored.token_ids == plain.token_ids
    assert len(scored.logprobs) == len(scored.token_ids)
    ranks = [entry.rank for entry in scored.logprobs]
    assert min(ranks) == 1 < max(ranks), "the mask overruled the model somewhere, and it shows"


def test_n_answers_depend_on_their_seeds_only(llm: LLM) -> None:
    spec = json_schema_spec(PERSON, strict=True)
    together = [a.token_ids for a in ask(llm, spec, n=4, seed=9)]
    assert [a.token_ids for a in ask(llm, spec, n=2, seed=9)] == together[:2]
    assert len({tuple(ids) for ids in together}) > 1


def test_stop_strings_and_penalties_compose(llm: LLM) -> None:
    spec = json_schema_spec(PERSON, strict=True, any_whitespace=False)
    (answer,) = ask(llm, spec, stop=(',"age"',), temperature=0.0)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ',"age"')
    assert json.loads(answer.text + "}")["name"]
    (answer,) = ask(llm, spec, repetition_penalty=1.8, frequency_penalty=1.5, temperature=0.0)
    assert is_valid(json.loads(answer.text), PERSON)


def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="'not'"):
        ask(llm, json_schema_spec({"not": {}}))


async def collect(engine: AsyncEngine, spec: GrammarSpec, **params: Any) -> tuple[str, str | None]:
    text, reason = "", None
    given = SamplingParams(grammar=spec, **{"max_tokens": 200, **params})
    async for output in generate(engine, "hello", given, request_id="r"):
        text += output.outputs[0].text
        reason = output.outputs[0].finish_reason
    return text, reason


def test_the_simulator_keeps_to_grammars_too() -> None:
    import asyncio

    async def main() -> None:
        config = EngineConfig(device="sim", sim=SimConfig(time_scale=0.0))
        engine = await AsyncEngine.start(config)
        await engine.ready()
        spec = json_schema_spec(PERSON, strict=True, any_whitespace=False)
        texts = set()
        for seed in range(6):
            text, reason = await collect(engine, spec, seed=seed)
            assert reason == "stop" and is_valid(json.loads(text), PERSON)
            texts.add(text)
            assert (text, reason) == await collect(engine, spec, seed=seed)
        assert len(texts) > 3
        with pytest.raises(InvalidRequest, match="cannot be used"):
            await collect(engine, regex_spec("(?=a)b"))
        await collect(engine, spec, seed=0)
        compiled = engine.stats
        assert sum(compiled.grammar_compile_counts) == 2 and compiled.grammar_failures == 1
        await engine.stop()

    asyncio.run(main())
