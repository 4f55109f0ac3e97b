"""Harmony's messages on channels: thoughts, preambles, answers and calls, cut anywhere."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_engine.dialects.events import Arguments, CallBegun, Content, Event, Reasoning, joined
from octavo_engine.dialects.harmony import HARMONY, SPECIAL, HarmonyParser
from octavo_engine.dialects.tools import Tool, Tools

TOOLS = Tools((Tool(name="get_weather", parameters={}),))

THOUGHT = "<|channel|>analysis<|message|>They want rain.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>It rains."
PREAMBLE = "<|channel|>commentary<|message|>I look outside.<|end|>"
CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
TO_FIRST = ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
WEATHER: list[Event] = [CallBegun(0, "get_weather"), Arguments(0, '{"city": "Oslo"}')]


def parse(*pieces: str, tools: Tools | None = TOOLS, is_open: bool = True) -> list[Event]:
    parser = HarmonyParser(is_open=is_open, tools=tools)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return joined(events + parser.finish())


SAID: list[tuple[str, list[Event]]] = [
    (THOUGHT + NEXT + FINAL, [Reasoning("They want rain."), Content("It rains.")]),
    (FINAL + "<|return|>", [Content("It rains.")]),
    (THOUGHT + NEXT + CALL, [Reasoning("They want rain."), *WEATHER]),
    (THOUGHT + NEXT + TO_FIRST, [Reasoning("They want rain."), *WEATHER]),
    (TO_FIRST, WEATHER),
    (PREAMBLE + NEXT + CALL, [Content("I look outside."), *WEATHER]),
    (CALL + NEXT + CALL, [*WEATHER, CallBegun(1, "get_weather"), Arguments(1, '{"city": "Oslo"}')]),
    (THOUGHT + NEXT + THOUGHT + NEXT + FINAL,
     [Reasoning("They want rain.\nThey want rain."), Content("It rains.")]),
    # its own tools are its own affair
    ("<|channel|>commentary to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
    # a function that is offered, called without its namespace
    (CALL.replace("functions.", ""), WEATHER),
    ("<|channel|>commentary to=functions.get_weather<|message|><|call|>",
     [CallBegun(0, "get_weather"), Arguments(0, "{}")]),
    # cut short
    ("<|channel|>analysis<|message|>They wa", [Reasoning("They wa")]),
    (CALL[:-12], [CallBegun(0, "get_weather"), Arguments(0, '{"city": "Os')]),
    (THOUGHT + NEXT + "<|channel|>fin", [Reasoning("They want rain.")]),
    (THOUGHT + "\n", [Reasoning("They want rain.")]),
    # thoughts that were ended for the model
    ("<|channel|>analysis<|message|>They wa" + FINAL, [Reasoning("They wa"), Content("It rains.")]),
    # no harmony at all
    ("It rains.", [Content("It rains.")]),
    ("to be or <|not|> to be", [Content("to be or <|not|> to be")]),
    ("<|channel|>" + "x" * 600, [Content("<|channel|>" + "x" * 600)]),
    ("", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SAID, ids=lambda value: str(value)[:60])
def test_what_is_said_on_which_channel(text, expected):
    assert parse(text) == expected
    assert parse(*text) == expected


def test_where_no_call_is_read_only_the_final_message_is_the_answer():
    text = THOUGHT + NEXT + PREAMBLE + NEXT + CALL + NEXT + FINAL
    said = 'They want rain.\nI look outside.\n{"city": "Oslo"}'
    assert parse(text, tools=None) == [Reasoning(said), Content("It rains.")]


def test_an_answer_that_is_gone_on_with_is_a_final_message():
    assert parse(" still rains.", is_open=False) == [Content(" still rains.")]


def test_text_is_emitted_as_it_comes():
    parser = HarmonyParser(is_open=True, tools=TOOLS)
    assert parser.push("<|channel|>final<|mess") == []
    assert parser.is_undecided
    assert parser.push("age|>It ") == [Content("It ")]
    assert not parser.is_undecided
    assert parser.push("rains <") == [Content("rains ")]
    assert parser.push("|re") == []
    assert parser.push("al") == [Content("<|real")]


def test_thoughts_end_where_the_answer_or_a_call_begins():
    for text in (THOUGHT + NEXT + FINAL, THOUGHT + NEXT + CALL):
        ends = text.index("<|message|>", len(THOUGHT)) + len("<|message|>")
        for step in (1, 7, len(text)):
            parser = HARMONY.parser(is_open=True, tools=TOOLS)
            for begin in range(0, len(text), step):
                parser.push(text[begin : begin + step])
            assert parser.ends_at == ends


def test_the_prompt_tells_where_an_answer_begins():
    assert HARMONY.is_open_after("<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert not HARMONY.is_open_after("<|start|>assistant<|channel|>final<|message|>It ")


@given(
    parts=st.lists(
        st.sampled_from([*SPECIAL, "assistant", "analysis", "final", "commentary",
                         " to=functions.f", "text", "<", "<|", " ", "\n", "{}", "x" * 300]),
        max_size=14,
    ),
    seed=st.integers(0, 2**20),
)  # fmt: skip
def test_pieces_do_not_matter_and_nothing_breaks_it(parts, seed):
    text = "".join(parts)
    rng = random.Random(seed)
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, 9)
        pieces.append(rest[:size])
        rest = rest[size:]
    for tools in (TOOLS, None):
        for is_open in (True, False):
            whole = parse(text, tools=tools, is_open=is_open)
            assert parse(*pieces, tools=tools, is_open=is_open) == whole
