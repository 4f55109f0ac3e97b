"""POST /v1/messages as the official client sees it: whole, streamed, with tools and thoughts."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running
from tests.fakes.talking import HERMES, NOW, OSLO, THOUGHT, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator

HI: Any = [{"role": "user", "content": "weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "get_weather", "description": "of a city", "input_schema": SCHEMA},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 500, "messages": HI}


@contextmanager
def saying(
    *scripts: str, piece: int = 1, using: ServerSettings = HERMES
) -> Iterator[tuple[Any, Any]]:
    import anthropic  # seconds, which only those pay who use it

    with (
        scripted(*scripts, piece=piece, using=using) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        yield server, client


def blocks(content: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for block in content:
        match block.type:
            case "tool_use":
                found.append(("tool_use", block.name, block.input))
            case "thinking":
                found.append(("thinking", block.thinking))
            case _:
                found.append((block.type, block.text))
    return found


ALL = [
    ("thinking", "Which city? Oslo."),
    ("text", "Let me look."),
    ("tool_use", "get_weather", {"city": "Oslo"}),
    ("tool_use", "get_time", {}),
]


def prompt_of(server: Any) -> str:
    return bytes(server.engine.requests[-1][0]).decode()


@pytest.mark.slow
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_whole_and_streamed_are_the_same(piece):
    with saying(f"{THOUGHT}Let me look.\n{OSLO}\n{NOW}", piece=piece) as (_, client):
        whole = client.messages.create(**ASKED, tools=TOOLS)
        with client.messages.stream(**ASKED, tools=TOOLS) as stream:
            streamed = stream.get_final_message()

    assert blocks(whole.content) == blocks(streamed.content) == ALL
    assert whole.content[0].signature == streamed.content[0].signature != ""
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert whole.usage == streamed.usage
    assert whole.usage.output_tokens_details.thinking_tokens == len(THOUGHT.rstrip())
    assert whole.id.startswith("msg_") and whole.id != streamed.id
    assert (whole.role, whole.type, whole.model) == ("assistant", "message", "fake")
    assert len({block.id for block in [*whole.content[2:], *streamed.content[2:]]}) == 4


@pytest.mark.slow
def test_the_events_come_in_order():
    body = ASKED | {"tools": TOOLS, "stream": True}
    with saying(f"{THOUGHT}Yes.\n{OSLO}", piece=9) as (server, _), server.client() as client:
        text = client.post("/v1/messages", json=body, headers={"x-request-id": "mine"}).text

    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in frames]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert names == [event["type"] for event in events]
    kinds = [
        event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        for event in events
    ]
    assert [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind] == [
        "message_start",
        "content_block_start", "ping", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop",
        "content_block_start", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    assert starts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[1]["content_block"]["text"] == ""
    assert starts[2]["content_block"]["input"] == {}
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] == events[-2]["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-1] == {"type": "message_stop"}


def test_a_conversation_of_blocks_becomes_a_chat():
    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Oslo.", "signature": "of another server"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "A moment."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "id": "t2", "name": "get_time", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            {"type": "text", "text": "and"}, {"type": "text", "text": "now?"},
        ]},
    ]  # fmt: skip
    system: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    with saying("Dry.") as (server, client):
        client.messages.create(
            **ASKED | {"messages": conversation}, system=system, tools=TOOLS
        )  # fmt: skip
        prompt = prompt_of(server)

    assert prompt == (
        "<system>Be brief.\nBe kind.\n<user>weather?\n<assistant>A moment.\n<tool>rain\n"
        "<tool>error\n<user>and\nnow?\n<assistant>"
    )


def test_what_was_answered_can_be_sent_back():
    with saying(f"{THOUGHT}Let me look.\n{OSLO}") as (server, client):
        first = client.messages.create(**ASKED, tools=TOOLS)
        result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "rain"}
        turns = [*HI, first.to_param(), {"role": "user", "content": [result]}]
        server.engine.scripts[:] = ["It rains."]
        second = client.messages.create(**ASKED | {"messages": turns}, tools=TOOLS)
        prompt = prompt_of(server)

    assert blocks(second.content) == [("text", "It rains.")]
    assert second.stop_reason == "end_turn"
    assert prompt == "<user>weather?\n<assistant>Let me look.\n<tool>rain\n<assistant>"


def test_an_answer_can_be_begun_for_the_model():
    trusting = {"chat_template_kwargs": {"a": 1}}
    turns = [*HI, {"role": "assistant", "content": "It is "}]
    with saying("raining.") as (server, client):
        answer = client.messages.create(**ASKED | {"messages": turns}, extra_body=trusting)
        prompt = prompt_of(server)
    assert blocks(answer.content) == [("text", "raining.")]
    assert not prompt.endswith("<assistant>")


@pytest.mark.parametrize(
    ("choice", "script", "calls"),
    [
        ({"type": "tool", "name": "get_weather"}, '{"city": "Oslo"}', ["get_weather"]),
        ({"type": "any"}, f"{OSLO}\n{NOW}", ["get_weather", "get_time"]),
        ({"type": "any", "disable_parallel_tool_use": True}, f"{OSLO}\n{NOW}", ["get_weather"]),
        ({"type": "auto"}, OSLO, ["get_weather"]),
        ({"type": "none"}, OSLO, []),
    ],
)
def test_tool_choice(choice, script, calls):
    with saying(script) as (server, client):
        answer = client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
        grammar = server.engine.requests[-1][1].grammar

    assert [block.name for block in answer.content if block.type == "tool_use"] == calls
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")
    assert (grammar is not None) is (choice["type"] in ("any", "tool"))


def test_how_an_answer_ends():
    import anthropic

    engine = FakeEngine(max_model_len=64)
    with (
        running(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        cut = client.messages.create(**ASKED | {"max_tokens": 5})
        text = cut.content[0].text
        stopped = client.messages.create(
            **ASKED | {"max_tokens": 5}, stop_sequences=["zzz", text[2:4]]
        )
        with client.messages.stream(
            **ASKED | {"max_tokens": 5}, stop_sequences=["zzz", text[2:4]]
        ) as stream:
            streamed = stream.get_final_message()
        full = client.messages.create(
            **ASKED | {"max_tokens": 32000}, timeout=20, extra_body={"ignore_eos": True}
        )

    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    for answer in (stopped, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", text[2:4])
    # Clients ask for as many tokens as any model can give: here there is room for fewer.
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == 64


def test_thinking_can_be_hidden_or_switched_off():
    with saying(THOUGHT + "Yes.") as (_, client):
        answers = [
            client.messages.create(**ASKED | {"max_tokens": 2000}, thinking=thinking)
            for thinking in (
                {"type": "enabled", "budget_tokens": 1024},
                {"type": "adaptive", "display": "omitted"},
                {"type": "disabled"},
            )
        ]
    shown = [[block.type for block in answer.content] for answer in answers]
    assert shown == [["thinking", "text"], ["text"], ["text"]]


@pytest.mark.parametrize("parser", ["qwen3", "none"])
def test_a_budget_bounds_thoughts_where_they_can_be_told(parser):
    """Clients switch thinking on whatever model they meet, so one without thoughts takes it."""
    requested = {
        **ASKED,
        "max_tokens": 2000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with saying("Yes.", using=ServerSettings(reasoning_parser=parser)) as (server, client):
        client.messages.create(**requested)
        grammar = server.engine.requests[-1][1].grammar
    if parser == "none":
        assert grammar is None
    else:
        assert (grammar.after, grammar.budget, grammar.opens) == ("</think>", 1024, ("<think>",))


def test_a_schema_is_enforced():
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    with saying('{"city": "Oslo"}') as (server, client):
        answer = client.messages.create(**ASKED, output_config=config)
        grammar = server.engine.requests[-1][1].grammar
    assert json.loads(answer.content[0].text) == {"city": "Oslo"}
    assert grammar.kind == "json_schema"


def test_the_cache_is_told_in_their_way():
    import anthropic

    engine = FakeEngine(cached_tokens=16)
    with (
        running(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        answer = client.messages.create(**ASKED | {"max_tokens": 5})
        count = client.messages.count_tokens(model="fake", messages=HI).input_tokens
    usage = answer.usage
    assert usage.cache_read_input_tokens == 16
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usage.cache_creation_input_tokens == 0


def test_tokens_are_counted_without_an_answer():
    with saying("Hi.") as (server, client):
        bare = client.messages.count_tokens(model="fake", messages=HI)
        with_system = client.messages.count_tokens(
            model="fake", messages=HI, system="Be brief.", tools=TOOLS,
            tool_choice={"type": "any"}, thinking={"type": "enabled", "budget_tokens": 1024},
        )  # fmt: skip
        assert server.engine.requests == []
        client.messages.create(**ASKED, system="Be brief.", tools=TOOLS)
        prompt = prompt_of(server)
    assert bare.input_tokens == len("<user>weather?\n<assistant>")
    assert with_system.input_tokens == len(prompt)


# ── what Anthropic's clients ask beside messages ──


def test_edits_that_coding_agents_send_by_themselves_change_nothing():
    with saying("Hi.", "Hi.") as (server, client):
        requested: Any = {"model": "fake", "max_tokens": 9, "messages": HI}
        client.messages.create(**requested)
        plain = prompt_of(server)
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        managements: tuple[Any, ...] = ({"edits": edits}, {"edits": []}, {}, None)
        for management in managements:
            client.messages.create(**requested, extra_body={"context_management": management})
            assert prompt_of(server) == plain


def test_models_come_in_their_shape_and_in_pages():
    import anthropic

    with (
        running() as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        listed = list(client.models.list(limit=1))  # page after page
        one = client.models.retrieve("alias")
        before = client.models.list(before_id="alias", limit=1)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.models.retrieve("other")
        with pytest.raises(anthropic.BadRequestError):
            client.models.list(after_id="other")
        with server.client() as plain:
            ours = plain.get("/v1/models").json()

    assert [model.id for model in listed] == ["fake", "alias"]
    assert (one.type, one.display_name) == ("model", "alias") and one == listed[1]
    assert ([model.id for model in before.data], before.has_more) == (["fake"], False)
    body: Any = unknown.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert [card["object"] for card in ours["data"]] == ["model"] * 2
