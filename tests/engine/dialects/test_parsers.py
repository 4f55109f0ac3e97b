"""What models write, and what is made of it: whole, cut anywhere, broken, hostile."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.dialects import marks
from octavo_engine.dialects.answer import AnswerParser
from octavo_engine.dialects.events import (
    Arguments,
    CallBegun,
    Content,
    Event,
    Parser,
    Reasoning,
    joined,
)
from octavo_engine.dialects.formats import REASONING_FORMATS, TOOL_FORMATS
from octavo_engine.dialects.json_calls import ArgumentsOnly
from octavo_engine.dialects.reasoning import ReasoningParser
from octavo_engine.dialects.tools import Tool, Tools

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "object"},
        },
    },
)  # fmt: skip
TIME = Tool(name="get_time", parameters={})
TOOLS = Tools((WEATHER, TIME))

OSLO = {"city": "Oslo", "days": 3}
CET = {"zone": "CET"}


def parse(parser: Parser, pieces: list[str]) -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined(events + parser.finish())


def tools_in(name: str, *pieces: str) -> list[Event]:
    return parse(TOOL_FORMATS[name].syntax.parser(TOOLS), list(pieces))


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    names = [event.name for event in events if isinstance(event, CallBegun)]
    return [(name, json.loads(arguments[index])) for index, name in enumerate(names)]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def deepseek(name: str, arguments: str, *, fenced: bool) -> str:
    head = f"function{marks.DEEPSEEK_SEPARATOR}{name}\n```json\n" if fenced else name
    tail = "\n```" if fenced else ""
    middle = "" if fenced else marks.DEEPSEEK_SEPARATOR
    return f"{marks.DEEPSEEK_CALL}{head}{middle}{arguments}{tail}{marks.DEEPSEEK_CALL_END}"


def kimi(number: int, name: str, arguments: str) -> str:
    return (
        f"{marks.KIMI_CALL}functions.{name}:{number}{marks.KIMI_ARGUMENTS}{arguments}"
        f"{marks.KIMI_CALL_END}"
    )


J_OSLO, J_CET = json.dumps(OSLO), json.dumps(CET)
QWEN_OSLO = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
QWEN_CET = (
    "<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_OSLO = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
GLM_CET = "<tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n</tool_call>"

DSML_CALLS = (
    '<|DSML|invoke name="get_weather">\n<|DSML|parameter name="city" string="true">Oslo'
    '</|DSML|parameter>\n<|DSML|parameter name="days" string="false">3</|DSML|parameter>\n'
    '</|DSML|invoke>\n<|DSML|invoke name="get_time">\n'
    '<|DSML|parameter name="zone" string="true">CET</|DSML|parameter>\n</|DSML|invoke>\n'
).replace("|DSML|", marks.DSML)
DSML_ODD = (
    '<|DSML|function_calls>\n<|DSML|invoke name="f">\n'
    '<|DSML|parameter name="a" string="true">5</|DSML|parameter>\n'
    '<|DSML|parameter name="b" string="false">{"c": [1]}</|DSML|parameter>\n'
    "</|DSML|invoke>\n</|DSML|function_calls>"
).replace("|DSML|", marks.DSML)
NS = "]<]minimax[>["

TWO: dict[str, str] = {
    "generic": f'<tool_call>\n{{"name": "get_weather", "arguments": {J_OSLO}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_time", "arguments": {J_CET}}}\n</tool_call>',
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {J_OSLO}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_time", "arguments": {J_CET}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {J_OSLO}}}, '
    f'{{"name": "get_time", "arguments": {J_CET}}}]',
    "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{J_OSLO}[TOOL_CALLS]get_time[ARGS]{J_CET}",
    "llama3_json": f'<|python_tag|>{{"name": "get_weather", "parameters": {J_OSLO}}}; '
    f'{{"name": "get_time", "parameters": {J_CET}}}',
    "pythonic": '[get_weather(city="Oslo", days=3), get_time(zone=\'CET\')]',
    "llama4_pythonic": '<|python_start|>[get_weather(city="Oslo", days=3), '
    "get_time(zone='CET')]<|python_end|>",
    "qwen3_coder": f"{QWEN_OSLO}\n{QWEN_CET}",
    "glm45": f"{GLM_OSLO}\n{GLM_CET}",
    "deepseek_v3": marks.DEEPSEEK_CALLS + deepseek("get_weather", J_OSLO, fenced=True) + "\n"
    + deepseek("get_time", J_CET, fenced=True) + marks.DEEPSEEK_CALLS_END,
    "deepseek_v31": marks.DEEPSEEK_CALLS + deepseek("get_weather", J_OSLO, fenced=False)
    + deepseek("get_time", J_CET, fenced=False) + marks.DEEPSEEK_CALLS_END,
    "kimi_k2": marks.KIMI_CALLS + kimi(0, "get_weather", J_OSLO) + kimi(1, "get_time", J_CET)
    + marks.KIMI_CALLS_END,
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {J_OSLO}}}, '
    f'{{"name": "get_time", "arguments": {J_CET}}}]',
    "granite-20b-fc": f'<function_call> {{"name": "get_weather", "arguments": {J_OSLO}}} '
    f'<function_call> {{"name": "get_time", "arguments": {J_CET}}}',
    "jamba": f'<tool_calls>[\n{{"name": "get_weather", "arguments": {J_OSLO}}},\n'
    f'{{"name": "get_time", "arguments": {J_CET}}}\n]</tool_calls>',
    "xlam": f'[{{"name": "get_weather", "arguments": {J_OSLO}}}, '
    f'{{"name": "get_time", "arguments": {J_CET}}}]',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {J_OSLO}}}'
    f'<|action_end|>\n<|action_start|><|plugin|>{{"name": "get_time", "parameters": {J_CET}}}'
    "<|action_end|>",
    "phi4_mini_json": f'functools[{{"name": "get_weather", "arguments": {J_OSLO}}}, '
    f'{{"name": "get_time", "arguments": {J_CET}}}]',
    "seed_oss": QWEN_OSLO.replace(">\n3\n<", ">3<").replace(">\nOslo\n<", ">Oslo<").replace(
        "tool_call>", "seed:tool_call>") + "\n"
    + QWEN_CET.replace(">\nCET\n<", ">CET<").replace("tool_call>", "seed:tool_call>"),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n'
    '<parameter name="zone">CET</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Oslo{NS}</city>'
    f'{NS}<days>3{NS}</days>{NS}</invoke>\n{NS}<invoke name="get_time">{NS}<zone>CET{NS}</zone>'
    f"{NS}</invoke>\n{NS}</tool_call>",
    "deepseek_v32": f"<{marks.DSML}function_calls>\n{DSML_CALLS}</{marks.DSML}function_calls>",
    "deepseek_v4": f"<{marks.DSML}tool_calls>\n{DSML_CALLS}</{marks.DSML}tool_calls>",
    "minicpm5": '<function name="get_weather"><param name="city">Oslo</param><param name="days">3'
    '</param></function>\n<function name="get_time"><param name="zone">CET</param></function>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
    '<|tool_call>call:get_time{zone:<|"|>CET<|"|>}<tool_call|>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Oslo", days=3), get_time(zone="CET")]'
    "<|tool_call_end|>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    f'"parameters": {J_OSLO}}},\n    {{"tool_call_id": "1", "tool_name": "get_time", '
    f'"parameters": {J_CET}}}\n]<|END_ACTION|>',
    "command_r": f'Action:\n```json\n[\n    {{"tool_name": "get_weather", "parameters": {J_OSLO}}},'
    f'\n    {{"tool_name": "get_time", "parameters": {J_CET}}}\n]\n```',
    "apertus": f'<|tools_prefix|>[{{"get_weather": {J_OSLO}}}, {{"get_time": {J_CET}}}]'
    "<|tools_suffix|>",
    "nemotron": f'<TOOLCALL>[{{"name": "get_weather", "arguments": {J_OSLO}}}, '
    f'{{"name": "get_time", "arguments": {J_CET}}}]</TOOLCALL>',
    "gigachat3": "<|message_sep|>\n\nfunction call<|role_sep|>\n"
    f'{{"name": "get_weather", "arguments": {J_OSLO}}}<|message_sep|>\n\nfunction call<|role_sep|>'
    f'\n{{"name": "get_time", "arguments": {J_CET}}}',
    "gigachat31": f'<|function_call|>{{"name": "get_weather", "arguments": {J_OSLO}}}'
    f'<|function_call|>{{"name": "get_time", "arguments": {J_CET}}}',
    "functionary_v31": f"<function=get_weather>{J_OSLO}</function>"
    f"<function=get_time>{J_CET}</function>",
    "functionary_v32": f"get_weather\n{J_OSLO}>>>get_time\n{J_CET}",
    "solar": f"<|tool_call:begin|>a<|tool_call:name|>get_weather<|tool_call:args|>{J_OSLO}"
    f"<|tool_call:end|><|tool_call:begin|>b<|tool_call:name|>get_time<|tool_call:args|>{J_CET}"
    "<|tool_call:end|>",
    "openai": (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{json.dumps(OSLO)}<|call|><|start|>assistant<|channel|>commentary to=functions.get_time"
        f"<|message|>{json.dumps(CET)}<|call|>"
    ),
}  # fmt: skip
AT_THE_HEAD = ("pythonic", "xlam", "functionary_v32")  # no mark: calls stand alone


def test_every_format_has_its_example():
    assert set(TWO) == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", sorted(TWO))
def test_two_calls(name):
    events = tools_in(name, TWO[name])

    assert calls_of(events) == [("get_weather", OSLO), ("get_time", CET)]
    assert content_of(events) == ""


# In harmony text is a message of its own, and its space is its own too.
@pytest.mark.parametrize("name", sorted(set(TWO) - {*AT_THE_HEAD, "openai"}))
def test_text_before_calls_is_content_without_the_space_between(name):
    events = tools_in(name, "Let me look.\n\n" + TWO[name] + "\n")

    assert events[0] == Content("Let me look.")
    assert len(calls_of(events)) == 2
    assert content_of(events) == "Let me look."


@pytest.mark.parametrize("name", sorted(TWO))
def test_every_way_to_cut_an_answer_in_two_reads_the_same(name):
    text = "Well… \n" * (name not in AT_THE_HEAD) + TWO[name] + "\n"
    whole = tools_in(name, text)
    for cut in range(len(text)):
        assert tools_in(name, text[:cut], text[cut:]) == whole
    assert tools_in(name, *text) == whole


@pytest.mark.parametrize("name", sorted(TWO))
def test_a_text_that_ends_anywhere_tells_no_more_than_the_whole(name):
    """What was streamed up to there is a beginning of what is streamed in all."""
    text = TWO[name]
    parser = TOOL_FORMATS[name].syntax.parser(TOOLS)
    so_far: list[Event] = []
    whole = tools_in(name, text)
    for char in text:
        so_far += parser.push(char)
        got = joined(so_far)
        if not got:
            continue
        assert got[:-1] == whole[: len(got) - 1]
        assert str(getattr(whole[len(got) - 1], "text", "")).startswith(
            str(getattr(got[-1], "text", ""))
        )


def test_arguments_are_streamed_as_they_come():
    parser = TOOL_FORMATS["hermes"].syntax.parser(TOOLS)
    assert parser.push('<tool_call>{"name": "get_time", "arg') == []
    assert parser.push('uments": {"zo') == [CallBegun(0, "get_time"), Arguments(0, '{"zo')]
    assert parser.push('ne": "CET"') == [Arguments(0, 'ne": "CET"')]
    assert parser.push("}}</tool_call>") == [Arguments(0, "}")]
    assert parser.finish() == []


ODD: list[tuple[str, str, list[Event]]] = [
    ("hermes", "plain words", [Content("plain words")]),
    ("hermes", " kept  \n", [Content(" kept  \n")]),
    ("hermes", "<tool_call>", [Content("<tool_call>")]),
    ("hermes", "<tool_call>no", [Content("<tool_call>no")]),
    ("hermes", "a <tool_call> {]", [Content("a <tool_call> {]")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [CallBegun(0, "f"), Arguments(0, "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
     [CallBegun(0, "f"), Arguments(0, '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
     [CallBegun(0, "f"), Arguments(0, '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>',
     [CallBegun(0, "f"), Arguments(0, "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>"}}</tool_call>',
     [CallBegun(0, "f"), Arguments(0, '{"a": "}</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call> and so',
     [CallBegun(0, "f"), Arguments(0, "{}"), Content("and so")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1',
     [CallBegun(0, "f"), Arguments(0, '{"a": [1')]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}',
     [Content('<tool_call>{"name": 5, "arguments": {}}')]),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}',
     [Content('<tool_call>{"name": "", "arguments": {}}')]),
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {}}',
     [Content("<tool_call>"), CallBegun(0, "f"), Arguments(0, "{}")]),
    ("llama3_json", '{"name": "Alice", "parameters": {}}',
     [Content('{"name": "Alice", "parameters": {}}')]),
    ("llama3_json", '{"name": "get_time"}', [Content('{"name": "get_time"}')]),
    ("llama3_json", 'I say {"name": "get_time", "parameters": {}}',
     [Content('I say {"name": "get_time", "parameters": {}}')]),
    ("llama3_json", '{"name": "get_time", "parameters": {}}',
     [CallBegun(0, "get_time"), Arguments(0, "{}")]),
    ("mistral", '[TOOL_CALLS]get_time[ARGS]{"zone": "CET"}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}',
     [CallBegun(0, "get_time"), Arguments(0, '{"zone": "CET"}'), CallBegun(1, "f"),
      Arguments(1, "{}")]),
    ("mistral", "[TOOL_CALLS] no, words", [Content("[TOOL_CALLS] no, words")]),
    ("pythonic", "[1] As was said", [Content("[1] As was said")]),
    ("pythonic", "[f(__import__('os').system('x'))]",
     [Content("[f(__import__('os').system('x'))]")]),
    ("pythonic", "[f(a=open('x'))]", [Content("[f(a=open('x'))]")]),
    ("pythonic", "[f(a=[1, {'b': true}], c=-1.5)]",
     [CallBegun(0, "f"), Arguments(0, '{"a": [1, {"b": true}], "c": -1.5}')]),
    ("pythonic", "[f(a=1e999)]", [Content("[f(a=1e999)]")]),
    ("pythonic", "[f(a=b'x')]", [Content("[f(a=b'x')]")]),
    ("kimi_k2", marks.KIMI_CALLS + kimi(7, "f", "{}") + marks.KIMI_CALLS_END,
     [CallBegun(0, "f", "functions.f:7"), Arguments(0, "{}")]),
    ("qwen3_coder", "<function=get_weather><parameter=city>1</parameter></function>",
     [CallBegun(0, "get_weather"), Arguments(0, '{"city": "1"}')]),
    ("qwen3_coder", "<function=get_weather><parameter=days>many</parameter></function>",
     [CallBegun(0, "get_weather"), Arguments(0, '{"days": "many"}')]),
    ("qwen3_coder", "<function=f><parameter=x>True</parameter><parameter=y>{'a': 1}</parameter>",
     [CallBegun(0, "f"), Arguments(0, '{"x": true, "y": {"a": 1}')]),
    ("qwen3_coder", "<function=get_weather><parameter=city>\nline 1\n\nline 3\n</parameter>",
     [CallBegun(0, "get_weather"), Arguments(0, '{"city": "line 1\\n\\nline 3"')]),
    ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>a\n</parameter>\n"
     "</function>\n</seed:tool_call>",
     [CallBegun(0, "get_weather"), Arguments(0, '{"city": "a\\n"}')]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
     [CallBegun(0, "f"), Arguments(0, "{}")]),
    ("minimax_m3", f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<o>{NS}<a>1{NS}</a>{NS}<l>'
     f"{NS}<item>x{NS}</item>{NS}<item>true{NS}</item>{NS}</l>{NS}</o>{NS}</invoke>\n"
     f"{NS}</tool_call>",
     [CallBegun(0, "f"), Arguments(0, '{"o": {"a": 1, "l": ["x", true]}}')]),
    ("minimax_m3", f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}</invoke>\n{NS}</tool_call>',
     [CallBegun(0, "f"), Arguments(0, "{}")]),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>", [CallBegun(0, "f"), Arguments(0, "{}")]),
    ("gemma4", '<|tool_call>call:f{a:-7,b:1.5e10,c:false,d:null,e:[],g:{},h:[<|"|>x "y"<|"|>,'
     '{i:<|"|>{}<|"|>}]}<tool_call|>',
     [CallBegun(0, "f"), Arguments(0, '{"a": -7, "b": 1.5e10, "c": false, "d": null, "e": [], '
      '"g": {}, "h": ["x \\"y\\"", {"i": "{}"}]}')]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>Os', [CallBegun(0, "f"), Arguments(0, '{"a": "Os')]),
    ("gemma4", "<|tool_call>no", [Content("<|tool_call>no")]),
    ("deepseek_v32", DSML_ODD, [CallBegun(0, "f"), Arguments(0, '{"a": "5", "b": {"c": [1]}}')]),
    ("functionary_v32", "all\nHello.", [Content("Hello.")]),
    ("functionary_v32", 'all\nLook.>>>get_time\n{"zone": "CET"}',
     [Content("Look."), CallBegun(0, "get_time"), Arguments(0, '{"zone": "CET"}')]),
    ("functionary_v32", "Hello.", [Content("Hello.")]),
    ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|> ok',
     [CallBegun(0, "f"), Arguments(0, '{"a": 1}'), Content("ok")]),
    ("lfm2", "Use [link](url).", [Content("Use [link](url).")]),
    ("lfm2", "<|tool_call_start|>[a.b(c={'d': True, 'e': None})]<|tool_call_end|>",
     [CallBegun(0, "a.b"), Arguments(0, '{"c": {"d": true, "e": null}}')]),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f"}]<|END_ACTION|>',
     [CallBegun(0, "f"), Arguments(0, "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>",
     [CallBegun(0, "f"), Arguments(0, "{}")]),
]  # fmt: skip


NULLABLE = Tool(
    name="f",
    parameters={
        "$defs": {"Text": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "properties": {
            "list": {"type": ["string", "null"]},
            "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "one": {"oneOf": [{"type": "null"}, {"enum": ["a", "b"]}]},
            "old": {"type": "string", "nullable": True},
            "ref": {"$ref": "#/$defs/Text"},
            "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "text": {"type": "string"},
            "const": {"const": "42"},
            "open": {},
            "lost": {"$ref": "#/nowhere"},
        },
    },
)  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "seed_oss", "minimax_m2", "minimax_m3"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("list", "null", None), ("any", "null", None), ("one", "null", None),
        ("old", "null", None), ("ref", "null", None), ("number", "null", None),
        ("list", "5", "5"), ("any", "5", "5"), ("one", "a", "a"), ("ref", "[1]", "[1]"),
        ("number", "5", 5), ("number", "five", "five"), ("text", "null", "null"),
        ("const", "42", "42"), ("open", "null", None), ("open", "5", 5), ("lost", "5", 5),
        ("any", "nullable", "nullable"),
    ],
)  # fmt: skip
def test_null_is_a_string_only_where_nothing_else_is_allowed(name, key, text, value):
    call = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"
        "</tool_call>",
        "seed_oss": f"<seed:tool_call>\n<function=f>\n<parameter={key}>{text}</parameter>\n"
        "</function>\n</seed:tool_call>",
        "minimax_m2": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{text}'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
        "minimax_m3": f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<{key}>{text}{NS}</{key}>'
        f"{NS}</invoke>\n{NS}</tool_call>",
    }[name]
    parser = TOOL_FORMATS[name].syntax.parser(Tools((NULLABLE,)))
    assert calls_of(parse(parser, [call])) == [("f", {key: value})]


@pytest.mark.parametrize(("name", "text", "expected"), ODD, ids=lambda value: str(value)[:50])
def test_odd_and_broken_calls(name, text, expected):
    assert tools_in(name, text) == expected
    assert tools_in(name, *text) == expected


def test_a_named_call_is_all_arguments():
    parser = ArgumentsOnly("f")
    assert parse(parser, ["\n", '{"a"', ": 1}"]) == [CallBegun(0, "f"), Arguments(0, '{"a": 1}')]


# ── reasoning ──

THINK = REASONING_FORMATS["qwen3"]
REASONED: list[tuple[str, bool, list[Event]]] = [
    ("<think>\nHm.\n</think>\n\nYes.", False, [Reasoning("Hm."), Content("Yes.")]),
    ("\nHm.\n</think>\n\nYes.", True, [Reasoning("Hm."), Content("Yes.")]),
    ("<think>Hm.</think>Yes.", True, [Reasoning("Hm."), Content("Yes.")]),
    ("<think>\n\n</think>\n\nYes.", False, [Content("Yes.")]),
    ("<think>Hm", False, [Reasoning("Hm")]),
    ("Hm. </thi", True, [Reasoning("Hm. </thi")]),
    ("<thin air", False, [Content("<thin air")]),
    (" Yes. <think>no</think>", False, [Content(" Yes. <think>no</think>")]),
    ("<think>a<think>b</think>c</think>d", False, [Reasoning("a<think>b"), Content("c</think>d")]),
    ("", True, []),
    ("<think>", False, []),
    ("  ", False, [Content("  ")]),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), REASONED)
def test_reasoning(text, is_open, expected):
    assert parse(AnswerParser(ReasoningParser(THINK, is_open=is_open), None), [text]) == expected
    for cut in range(len(text)):
        parser = AnswerParser(ReasoningParser(THINK, is_open=is_open), None)
        assert parse(parser, [text[:cut], text[cut:]]) == expected


def test_the_prompt_tells_whether_reasoning_is_open():
    r1 = REASONING_FORMATS["deepseek_r1"]
    assert THINK.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open_after("user: <think>\nassistant\n")
    assert not THINK.is_open_after("assistant\n<think>\n\n</think>\n\n")
    assert r1.is_open_after("assistant\n")
    assert not r1.is_open_after("assistant\n<think>\n\n</think>\n\n")
    assert r1.is_open_inside("<think>Hm") and THINK.is_open_inside("\n<think>")
    assert not r1.is_open_inside("It is") and not r1.is_open_inside("<think>Hm</think>It")


def test_calls_inside_reasoning_are_thoughts():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = AnswerParser(
        ReasoningParser(THINK, is_open=True), TOOL_FORMATS["hermes"].syntax.parser(TOOLS)
    )
    assert parse(parser, [f"maybe {call}</think>\n{call}"]) == [
        Reasoning(f"maybe {call}"), CallBegun(0, "f"), Arguments(0, "{}"),
    ]  # fmt: skip


def reading(name: str, *, is_open: bool) -> AnswerParser:
    """As a server puts it together."""
    format = TOOL_FORMATS[name]
    split = ReasoningParser(THINK, is_open=is_open)
    return AnswerParser(split, format.syntax.parser(TOOLS), begins=format.begins, callable=TOOLS)


UNCLOSED = (
    "hermes",
    "qwen3_coder",
    "glm45",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v31",
    "minimax_m2",
)


@pytest.mark.parametrize("name", UNCLOSED)
@pytest.mark.parametrize("opens", ["", "<think>\n"])
@pytest.mark.parametrize("thought", ["", "I need both.\n\n"])
def test_calls_end_reasoning_that_is_never_closed(name, opens, thought):
    text = opens + thought + TWO[name]
    for cut in range(0, len(text), 3):
        parser = reading(name, is_open=not opens)
        events = parse(parser, [text[:cut], text[cut:]])
        assert calls_of(events) == [("get_weather", OSLO), ("get_time", CET)]
        thoughts = [event for event in events if isinstance(event, Reasoning)]
        assert thoughts == ([Reasoning("I need both.")] if thought else [])
        assert parser.reasoning is not None
        assert parser.reasoning.ends_at is not None
        assert text[parser.reasoning.ends_at :].strip() == TWO[name]


def test_a_call_that_was_thought_of_is_none_once_reasoning_ends():
    text = f"Maybe {TWO['hermes']}, hm.</think>No."
    expected = [Reasoning(f"Maybe {TWO['hermes']}, hm."), Content("No.")]
    for cut in range(len(text)):
        assert parse(reading("hermes", is_open=True), [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize(
    "text",
    ["I could use <tool_call>", "It would be <tool_call>{}", "Say <tool_ca",
     'As <tool_call>{"name": "nobody", "arguments": {}}</tool_call>'],
)  # fmt: skip
def test_thoughts_that_are_cut_off_stay_thoughts(text):
    for cut in range(len(text)):
        events = parse(reading("hermes", is_open=True), [text[:cut], text[cut:]])
        assert events == [Reasoning(text)]


def test_thoughts_that_end_before_they_begin_are_none():
    format = REASONING_FORMATS["minimax_m3"]
    text = "</mm:think>Hello."
    for cut in range(len(text)):
        parser = AnswerParser(ReasoningParser(format, is_open=False), None)
        assert parse(parser, [text[:cut], text[cut:]]) == [Content("Hello.")]


MARKED = {
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}


@pytest.mark.parametrize("name", MARKED)
def test_other_marks_of_reasoning(name):
    begin, end = MARKED[name]
    text = f"{begin}Hm.{end}Yes."
    for cut in range(len(text)):
        parser = AnswerParser(ReasoningParser(REASONING_FORMATS[name], is_open=False), None)
        assert parse(parser, [text[:cut], text[cut:]]) == [Reasoning("Hm."), Content("Yes.")]


# ── any text, cut anywhere ──

PIECES = st.sampled_from(
    [*(piece for name in TWO for piece in TWO[name].replace("{", "\0{").split("\0")),
     *(mark for format in TOOL_FORMATS.values() for mark in format.special),
     "<think>", "</think>", "[THINK]", "[/THINK]", '"', "\\", "{", "}", "[", "]", ",", ":",
     "(", ")", "\n", " ", '"name"', '"arguments"', "null", "f", "é", "\U0001f600", "<", "functools"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=10).map("".join)


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, rng.randint(0, 12))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@settings(max_examples=25, deadline=None, derandomize=True)
@given(text=TEXTS, seed=st.integers(0, 2**16))
def test_no_text_breaks_a_parser_and_no_cut_changes_what_it_reads(name, text, seed):
    """Not even what is told before the end: a stream that is resumed relies on it."""
    format = REASONING_FORMATS["mistral" if seed % 3 == 0 else "qwen3"]

    def read(pieces: list[str]) -> tuple[list[Event], list[Event]]:
        split = ReasoningParser(format, is_open=seed % 2 == 0)
        tools = TOOL_FORMATS[name]
        begins = tools.begins if seed % 5 else ()
        parser = AnswerParser(split, tools.syntax.parser(TOOLS), begins=begins, callable=TOOLS)
        reported: list[Event] = []
        for piece in pieces:
            reported += parser.push(piece)
        return joined(reported), joined(reported + parser.finish())

    whole = read([text])
    assert read(cuts(text, random.Random(seed))) == whole
    assert read(list(text)) == whole


# Harmony's marks are never the user's, and its headers are dropped: see test_harmony.py.
@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - {"openai"}))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_what_is_no_call_is_lost_nowhere(name, text):
    events = tools_in(name, text)
    if not any(isinstance(event, CallBegun) for event in events):
        assert content_of(events) == text


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    arguments=st.dictionaries(
        st.text(min_size=1, max_size=6),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=4), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    ),
    ascii=st.booleans(),
)
def test_any_arguments_come_through_as_they_are(arguments, ascii):
    text = json.dumps(arguments, ensure_ascii=ascii)
    call = f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>'
    assert tools_in("hermes", call) == [CallBegun(0, "f"), Arguments(0, text)]
