"""What is enforced is what the dialect's own parser reads back: checked with the real grammars."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo_engine.dialects.events import Arguments, CallBegun, Event, joined
from octavo_engine.dialects.formats import TOOL_FORMATS
from octavo_engine.dialects.grammar_of_tools import (
    Enforced,
    at_least_one,
    calls_or,
    one_named,
    strict_calls,
)
from octavo_engine.dialects.tools import Tool, Tools
from octavo_engine.grammar.check import check
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.normal import json_schema_spec, structural_tag_spec
from octavo_engine.grammar.source import source_of

if TYPE_CHECKING:
    from octavo_engine.state.grammar import GrammarSpec

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Oslo", "Rome"]}},
    },
    strict=True,
)
TIME = Tool(name="get_time", parameters={})
TOOLS = Tools((WEATHER, TIME))
WITH_TAGS = sorted(name for name, format in TOOL_FORMATS.items() if format.tags is not None)
WITH_TRIGGERS = sorted(
    name for name, format in TOOL_FORMATS.items() if format.tags and format.tags.trigger
)


def spec_of(enforced: Enforced | None) -> GrammarSpec:
    assert enforced is not None
    if enforced.kind == "json_schema":
        return json_schema_spec(enforced.value)
    return structural_tag_spec(enforced.value)


def accepts(spec: GrammarSpec, text: str) -> bool:
    """Whether the whole text is of the language, byte for byte."""
    check(spec)
    matcher = LLMatcher(LLTokenizer("byte"), source_of(spec, {}, DEFAULT_LIMITS))
    for byte in text.encode():
        if not matcher.consume_token(byte):
            return False
    return bool(matcher.is_accepting())


def written(name: str, calls: list[tuple[str, str]]) -> str:
    tags = TOOL_FORMATS[name].tags
    assert tags is not None
    one = [tags.begin.replace("NAME", name) + arguments + tags.end for name, arguments in calls]
    return tags.around[0] + tags.separator.join(one) + tags.around[1]


def read(enforced: Enforced, name: str, text: str) -> list[Event]:
    parser = enforced.parser(TOOL_FORMATS[name], TOOLS)
    return joined(parser.push(text) + parser.finish())


OSLO = '{"city": "Oslo"}'
BOTH = [CallBegun(0, "get_weather"), Arguments(0, OSLO), CallBegun(1, "get_time"),
        Arguments(1, '{"a": 1}')]  # fmt: skip


@pytest.mark.parametrize("name", WITH_TAGS)
def test_required_calls_are_written_in_the_dialect_and_read_back(name):
    enforced = at_least_one(TOOLS.tools, TOOL_FORMATS[name], parallel=True)
    text = written(name, [("get_weather", OSLO), ("get_time", '{"a": 1}')])

    assert accepts(spec_of(enforced), text)
    assert read(enforced, name, text) == BOTH
    assert not accepts(spec_of(enforced), "")
    assert not accepts(spec_of(enforced), "Hello.")
    assert not accepts(spec_of(enforced), written(name, [("get_weather", '{"city": "Bonn"}')]))
    assert not accepts(spec_of(enforced), written(name, [("other", "{}")]))


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - set(WITH_TAGS)))
def test_where_the_dialect_cannot_be_enforced_calls_are_plain_json(name):
    enforced = at_least_one(TOOLS.tools, TOOL_FORMATS[name], parallel=True)
    text = json.dumps([
        {"name": "get_weather", "parameters": {"city": "Oslo"}},
        {"name": "get_time", "parameters": {"a": 1}},
    ])  # fmt: skip

    assert accepts(spec_of(enforced), text)
    assert read(enforced, name, text) == BOTH
    assert not accepts(spec_of(enforced), "[]")
    assert not accepts(spec_of(enforced), text.replace("Oslo", "Bonn"))


@pytest.mark.parametrize("name", [*WITH_TAGS, "pythonic"])
def test_without_parallel_calls_there_is_one(name):
    format = TOOL_FORMATS[name]
    enforced = at_least_one(TOOLS.tools, format, parallel=False)
    one: Any = json.dumps([{"name": "get_weather", "parameters": {"city": "Oslo"}}])
    two: Any = json.dumps([json.loads(one)[0]] * 2)
    if format.tags is not None:
        one = written(name, [("get_weather", OSLO)])
        two = written(name, [("get_weather", OSLO)] * 2)

    assert accepts(spec_of(enforced), one)
    assert not accepts(spec_of(enforced), two)


@pytest.mark.parametrize("name", WITH_TRIGGERS)
def test_strict_calls_in_free_text(name):
    spec = spec_of(strict_calls(TOOLS.tools, TOOL_FORMATS[name], parallel=True))

    assert accepts(spec, "Hello.")
    assert accepts(spec, "Let me look. " + written(name, [("get_weather", OSLO)]) + " There.")
    assert not accepts(spec, written(name, [("get_weather", '{"city": "Bonn"}')]))
    assert accepts(spec, written(name, [("get_time", '{"anything": ["goes"]}')]))


def test_nothing_is_enforced_where_no_function_is_strict():
    assert strict_calls((TIME,), TOOL_FORMATS["hermes"], parallel=True) is None
    assert strict_calls(TOOLS.tools, TOOL_FORMATS["pythonic"], parallel=True) is None


def test_a_named_function_is_its_arguments():
    enforced = one_named(WEATHER)

    assert accepts(spec_of(enforced), OSLO)
    assert not accepts(spec_of(enforced), "{}")
    assert read(enforced, "hermes", OSLO) == BOTH[:2]
    assert accepts(spec_of(one_named(TIME)), '{"any": "thing"}')
    assert not accepts(spec_of(one_named(TIME)), "[]")


def test_calls_or_an_answer_of_a_shape():
    shape = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
    spec = spec_of(calls_or(TOOLS.tools, TOOL_FORMATS["hermes"], shape, parallel=True))

    assert accepts(spec, "2")
    assert accepts(spec, written("hermes", [("get_weather", OSLO)]))
    assert not accepts(spec, "3")
    assert calls_or(TOOLS.tools, TOOL_FORMATS["kimi_k2"], shape, parallel=True) is None
