"""Tools and reasoning over HTTP: the official client reads what a scripted engine says."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.talking import (
    HI,
    NAMED,
    NOW,
    OSLO,
    THOUGHT,
    TIME,
    TOOLS,
    WEATHER,
    saying,
    streamed,
    whole,
    without_ids,
)

pytestmark = pytest.mark.slow

CALLED = {
    "content": "", "reasoning": "", "finish": "tool_calls",
    "calls": [["get_weather", '{"city": "Oslo"}'], ["get_time", "{}"]],
}  # fmt: skip


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_parallel_calls_whole_and_streamed(piece):
    with saying(f"{OSLO}\n{NOW}", piece=piece) as (_, client):
        at_once, answer = whole(client, tools=TOOLS)
        in_pieces, chunks = streamed(client, tools=TOOLS, seed=3)

    assert without_ids(at_once) == without_ids(in_pieces) == CALLED
    assert answer.choices[0].message.content is None
    ids = [call[0] for call in at_once["calls"] + in_pieces["calls"]]
    assert len(set(ids)) == 4
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


def test_arguments_are_streamed_as_they_come():
    with saying(OSLO) as (_, client):
        _, chunks = streamed(client, tools=TOOLS)

    arguments = [
        call.function.arguments
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert arguments == ["{", *'"city": "Oslo"}']


def test_without_parallel_calls_only_the_first_is_told():
    with saying(f"{OSLO}\n{NOW}") as (_, client):
        at_once, _ = whole(client, tools=TOOLS, parallel_tool_calls=False)
        in_pieces, _ = streamed(client, tools=TOOLS, parallel_tool_calls=False)

    assert [call[1] for call in at_once["calls"]] == ["get_weather"]
    assert without_ids(at_once) == without_ids(in_pieces)


def test_thoughts_content_and_calls_are_told_apart():
    with saying(f"{THOUGHT}Let me look.\n{OSLO}") as (_, client):
        at_once, answer = whole(client, tools=TOOLS)
        in_pieces, _ = streamed(client, tools=TOOLS)
        hidden, _ = streamed(client, tools=TOOLS, extra_body={"include_reasoning": False})

    expected = {
        "content": "Let me look.", "reasoning": "Which city? Oslo.", "finish": "tool_calls",
        "calls": [["get_weather", '{"city": "Oslo"}']],
    }  # fmt: skip
    assert without_ids(at_once) == without_ids(in_pieces) == expected
    assert without_ids(hidden) == {**expected, "reasoning": ""}
    thought = len(THOUGHT.rstrip())
    assert answer.usage.completion_tokens_details.reasoning_tokens == thought


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_reasoning_tokens_are_the_same_however_they_came(piece):
    options = {"include_usage": True, "continuous_usage_stats": True}
    with saying(THOUGHT + "Yes.", piece=piece) as (_, client):
        _, answer = whole(client)
        _, chunks = streamed(client, stream_options=options)

    counts = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == answer.usage.completion_tokens_details.reasoning_tokens
    assert counts[-1] == len(THOUGHT.rstrip())


def test_a_prompt_that_ends_in_thought_lets_the_answer_begin_there():
    template = "{{ messages[-1].content }}<think>\n"
    trusting = ServerSettings(reasoning_parser="qwen3", trust_request_chat_template=True)
    with saying("Hm.\n</think>\n\nYes.", using=trusting) as (server, client):
        at_once, _ = whole(client, extra_body={"chat_template": template})
        plain, _ = whole(client)
        assert server.engine.requests

    assert (at_once["reasoning"], at_once["content"]) == ("Hm.", "Yes.")
    assert (plain["reasoning"], plain["content"]) == ("", "Hm.\n</think>\n\nYes.")


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_a_call_inside_reasoning_that_is_never_closed_is_made(piece):
    thought = "<think>\nWhich city? Oslo.\n"
    with saying(thought + OSLO, piece=piece) as (_, client):
        at_once, answer = whole(client, tools=TOOLS)
        in_pieces, _ = streamed(client, tools=TOOLS)
    expected = ["get_weather", '{"city": "Oslo"}']
    assert (at_once["reasoning"], at_once["content"]) == ("Which city? Oslo.", "")
    assert ([call[1:] for call in at_once["calls"]], at_once["finish"]) == (
        [expected],
        "tool_calls",
    )
    assert without_ids(in_pieces) == without_ids(at_once)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)


def test_tool_choice_none_shows_the_tools_but_reads_no_calls():
    with saying(OSLO) as (_, client):
        at_once, _ = whole(client, tools=TOOLS, tool_choice="none")

    assert (at_once["content"], at_once["calls"], at_once["finish"]) == (OSLO, [], "stop")


@pytest.mark.parametrize("hides_them", [False, True])
def test_tools_that_may_not_be_called_can_be_hidden(hides_them):
    template = "{{ tools | length if tools else 'none' }} tools"
    using = ServerSettings(
        exclude_tools_when_tool_choice_none=hides_them, trust_request_chat_template=True
    )
    with saying("Hi.", using=using) as (_, client):
        _, answer = whole(
            client, tools=TOOLS, tool_choice="none",
            extra_body={"chat_template": template, "return_prompt_text": True},
        )  # fmt: skip

    assert answer.prompt_text == ("none tools" if hides_them else "2 tools")


def test_a_cut_call_ends_with_length_and_keeps_what_there_is():
    with saying(OSLO) as (_, client):
        at_once, _ = whole(client, tools=TOOLS, max_tokens=OSLO.index("Oslo") + 2)

    assert at_once["finish"] == "length"
    assert at_once["calls"][0][1:] == ["get_weather", '{"city": "Os']


@pytest.mark.parametrize("name", ["hermes", "none"])
def test_required_and_named_calls_are_enforced(name):
    """The grammar is the engine's; here it is that it is asked for, and how its text is read."""
    plain = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    using = ServerSettings(tool_call_parser=name)
    with saying(OSLO if name == "hermes" else plain, using=using) as (server, client):
        required, _ = streamed(client, tools=TOOLS, tool_choice="required")
        grammar = server.engine.requests[-1][1].grammar
    with saying('{"city": "Oslo"}', using=using) as (server, client):
        named, _ = streamed(client, tools=TOOLS, tool_choice=NAMED)
        at_once, _ = whole(client, tools=TOOLS, tool_choice=NAMED)
        schema = server.engine.requests[-1][1].grammar

    assert grammar is not None and schema is not None
    assert grammar.kind == ("structural_tag" if name == "hermes" else "json_schema")
    assert json.loads(schema.text)["properties"] == {"city": {"type": "string"}}
    call = ["get_weather", '{"city": "Oslo"}']
    assert (required["calls"][0][1:], required["finish"]) == (call, "tool_calls")
    assert (named["calls"][0][1:], named["finish"]) == (call, "stop")
    assert without_ids(at_once) == without_ids(named)


@pytest.mark.parametrize("name", ["hermes", "none"])
def test_a_forced_call_that_is_cut_off_leaves_nothing_in_content(name):
    plain = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
    text = OSLO if name == "hermes" else plain
    for length in range(1, len(text), 6):
        with saying(text, using=ServerSettings(tool_call_parser=name)) as (_, client):
            requested = {"tools": TOOLS, "tool_choice": "required", "max_tokens": length}
            at_once, answer = whole(client, **requested)
            in_pieces, _ = streamed(client, **requested)
        assert (at_once["content"], at_once["finish"]) == ("", "length"), text[:length]
        assert without_ids(in_pieces) == without_ids(at_once)
        assert answer.choices[0].message.content in (None, "")


def test_an_answer_without_calls_has_no_list_of_them():
    with saying("Hello.") as (_, client):
        _, answer = whole(client, tools=TOOLS)
    assert "tool_calls" not in answer.choices[0].message.to_dict()


def test_strict_functions_are_enforced_once_a_call_begins():
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with saying("Hello.") as (server, client):
        whole(client, tools=[strict, TIME])
        grammar = server.engine.requests[-1][1].grammar
        whole(client, tools=TOOLS)
        assert server.engine.requests[-1][1].grammar is None

    assert grammar is not None
    shape = json.loads(grammar.text)["format"]
    assert (shape["type"], shape["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["content"]["json_schema"] for tag in shape["tags"]] == [
        WEATHER["function"]["parameters"], {"type": "object"},
    ]  # fmt: skip


def test_tools_and_a_response_format_leave_the_choice_to_the_model():
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with saying('{"a": 1}') as (server, client):
        at_once, _ = whole(client, tools=TOOLS, response_format=schema)
        grammar = server.engine.requests[-1][1].grammar

    assert grammar is not None
    shape = json.loads(grammar.text)["format"]
    assert [part["type"] for part in shape["elements"]] == ["tags_with_separator", "json_schema"]
    assert at_once["content"] == '{"a": 1}'


def test_a_schema_waits_for_the_end_of_thought():
    template = "{{ messages[-1].content }}<think>\n"
    using = ServerSettings(reasoning_parser="qwen3", trust_request_chat_template=True)
    with saying("Hm.</think>{}", using=using) as (server, client):
        whole(
            client, response_format={"type": "json_object"}, extra_body={"chat_template": template}
        )
        grammar = server.engine.requests[-1][1].grammar

    assert grammar is not None and grammar.after == "</think>"


def test_a_pydantic_model_comes_back_parsed():
    pydantic = pytest.importorskip("pydantic")
    Weather = pydantic.create_model("Weather", city=(str, ...), days=(int, ...))
    with saying('{"city": "Oslo", "days": 3}') as (server, client):
        answer = client.chat.completions.parse(model="fake", messages=HI, response_format=Weather)
        grammar = server.engine.requests[-1][1].grammar

    assert answer.choices[0].message.parsed == Weather(city="Oslo", days=3)
    assert grammar is not None and grammar.kind == "json_schema"


def test_a_conversation_with_calls_and_results_is_rendered():
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
        "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}"
        "{% if m.reasoning_content %}~{{ m.reasoning_content }}{% endif %}]{% endfor %}"
    )
    call = {"id": "c1", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
    messages: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    trusting = ServerSettings(trust_request_chat_template=True)
    with saying("Sunny.", using=trusting) as (_, client):
        answer = client.chat.completions.create(
            model="fake", messages=messages,
            extra_body={"chat_template": template, "return_prompt_text": True},
        )  # fmt: skip

    assert answer.prompt_text.replace("\n", "|") == (
        "[system:Be kind.][user:a|b][assistant:Oslo~hm][tool:sunny#c1]"
    )


def test_echo_says_the_last_message_again_before_the_answer():
    messages = [*HI, {"role": "assistant", "content": "It is "}]
    requested: dict[str, Any] = {
        "model": "fake", "messages": messages,
        "extra_body": {"echo": True, "continue_final_message": True},
    }  # fmt: skip
    with saying("sunny.") as (_, client):
        answer = client.chat.completions.create(**requested)
        chunks = list(client.chat.completions.create(**requested, stream=True))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert answer.choices[0].message.content == text == "It is sunny."


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": []}),
    ("tools[1].function.name", {"tools": [WEATHER, WEATHER]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
    ("tool_choice", {"tools": [TIME], "tool_choice": NAMED}),
    ("tools", {"tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "nonsense"}}}], "tool_choice": "required"}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "yaml"}}),
    ("structured_outputs", {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}),
    ("structured_outputs", {"extra_body": {"structured_outputs": {"regex": "a("}}}),
    ("guided_json", {"extra_body": {"guided_json": {}}}),
    ("documents", {"extra_body": {"documents": [{"text": "a"}]}}),
    ("reasoning_effort", {"extra_body": {"reasoning_effort": "heroic"}}),
    ("thinking_token_budget", {"extra_body": {"thinking_token_budget": -5}}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -1}),
]  # fmt: skip


@pytest.fixture(scope="module")
def talker():
    with saying("Hello.") as (_, client):
        yield client


@pytest.mark.parametrize(("param", "requested"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_served_is_refused_by_name(talker, param, requested):
    with pytest.raises(openai.BadRequestError) as raised:
        talker.chat.completions.create(model="fake", messages=HI, **requested)

    assert raised.value.param == param


def test_tools_of_a_template_without_any_are_described_in_the_prompt():
    """FakeTemplate writes a line for each message, and knows no tools."""
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": [
            {"id": "a", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "b", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    with saying(f"Well.\n{OSLO}", using=ServerSettings()) as (server, client):
        at_once, _ = whole(client, tools=TOOLS)
        in_pieces, _ = streamed(client, tools=TOOLS)
        body = {"messages": history, "tools": TOOLS, "return_prompt_text": True}
        again = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
        counted = httpx.post(f"{server.url}/tokenize", json=body).json()
        plain = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": HI, "return_prompt_text": True},
        ).json()

    expected = {"content": "Well.", "reasoning": "", "finish": "tool_calls",
                "calls": [["get_weather", '{"city": "Oslo"}']]}  # fmt: skip
    assert without_ids(at_once) == without_ids(in_pieces) == expected
    prompt = again["prompt_text"]
    assert prompt.startswith("<system>You may call functions")
    assert all(json.dumps(tool["function"]) in prompt for tool in TOOLS)
    assert prompt.endswith(
        "<user>weather?\n"
        '<assistant>Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Oslo"}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n'
        "</tool_call>\n"
        "<user><tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
        "And now?\n<assistant>"
    )
    assert counted["count"] == again["usage"]["prompt_tokens"]
    assert plain["prompt_text"] == "<user>weather?\n<assistant>"


def test_bare_json_is_a_call_where_the_model_forgets_the_tags():
    bare = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    with saying(bare, using=ServerSettings()) as (_, client):
        at_once, _ = whole(client, tools=TOOLS)
    assert [call[1:] for call in at_once["calls"]] == [["get_weather", '{"city": "Oslo"}']]


def test_tools_are_refused_where_reading_them_is_switched_off():
    with (
        saying("Hello.", using=ServerSettings(tool_call_parser="none")) as (_, client),
        pytest.raises(openai.BadRequestError) as raised,
    ):
        whole(client, tools=TOOLS)

    assert raised.value.param == "tools"
    assert "--tool-call-parser" in raised.value.message
