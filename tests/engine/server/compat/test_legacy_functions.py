"""Functions as they were before tools: asked for, called, and told in their old words."""

from __future__ import annotations

import openai
import pytest

from tests.fakes.talking import HI, NOW, OSLO, THOUGHT, TOOLS, saying

FUNCTIONS = [tool["function"] for tool in TOOLS]
CALL = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}


def test_functions_are_called_and_told_as_they_were_asked_for():
    with saying(f"{THOUGHT}{OSLO}\n{NOW}") as (_, client):
        answer = client.chat.completions.create(model="fake", messages=HI, functions=FUNCTIONS)
        chunks = list(
            client.chat.completions.create(
                model="fake", messages=HI, functions=FUNCTIONS, stream=True
            )
        )
        (choice,) = answer.choices
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    reported = [delta for delta in deltas if delta is not None]

    assert choice.message.function_call.model_dump() == CALL
    assert choice.message.tool_calls is None and choice.message.content is None
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "function_call"
    assert reported[0].name == "get_weather" and not any(delta.name for delta in reported[1:])
    assert "".join(delta.arguments or "" for delta in reported) == CALL["arguments"]
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


def test_one_function_is_enforced_by_its_name():
    with saying('{"city": "Oslo"}') as (server, client):
        answer = client.chat.completions.create(
            model="fake", messages=HI, functions=FUNCTIONS, function_call={"name": "get_weather"}
        )
        grammar = server.engine.requests[-1][1].grammar
    assert answer.choices[0].message.function_call.model_dump() == CALL
    assert answer.choices[0].finish_reason == "stop"
    assert grammar is not None and grammar.kind == "json_schema"


def test_calls_and_results_of_old_are_read_as_those_of_tools():
    old = [
        *HI,
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "function", "name": "get_weather", "content": "rain"},
    ]
    new = [
        *HI,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function",
                                              "function": CALL}]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    with saying("Take an umbrella.") as (server, client):
        for messages in (old, new):
            client.chat.completions.create(model="fake", messages=messages)
        first, second = (requested[0] for requested in server.engine.requests)
    assert first == second


@pytest.fixture(scope="module")
def talker():
    with saying("Hello.") as (_, client):
        yield client


@pytest.mark.parametrize(
    ("param", "requested"),
    [
        ("functions", {"functions": []}),
        ("functions", {"functions": FUNCTIONS, "tools": TOOLS}),
        ("functions[1].name", {"functions": [FUNCTIONS[0], FUNCTIONS[0]]}),
        ("function_call", {"function_call": {"name": "get_weather"}}),
        ("function_call", {"functions": FUNCTIONS, "function_call": "always"}),
        ("function_call", {"functions": FUNCTIONS, "function_call": {"name": "nobody"}}),
        ("messages[0].function_call", {
            "messages": [{"role": "assistant", "content": "", "function_call": {}}]}),
    ],
)  # fmt: skip
def test_functions_that_make_no_sense_are_refused_by_name(talker, param, requested):
    with pytest.raises(openai.BadRequestError) as raised:
        talker.chat.completions.create(**{"model": "fake", "messages": HI, **requested})

    assert raised.value.param == param
