"""POST /v1/responses as the official client sees it: whole, streamed, with tools and schemas."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from octavo_engine.errors import EngineDead, GenerationFailed
from tests.fakes.engine import EOS, FakeEngine
from tests.fakes.server import running
from tests.fakes.talking import NOW, OSLO, THOUGHT, saying

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS},
    {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}},
]


def items(output: Any) -> list[tuple[str, ...]]:
    """What is left of items without their ids."""
    found: list[tuple[str, ...]] = []
    for item in output:
        if item.type == "function_call":
            found.append(("call", item.name, item.arguments, item.status))
        else:
            kind = "text" if item.type == "message" else item.type
            found.append((kind, "".join(part.text for part in item.content), item.status))
    return found


ALL = [
    ("reasoning", "Which city? Oslo.", "completed"),
    ("text", "Let me look.", "completed"),
    ("call", "get_weather", '{"city": "Oslo"}', "completed"),
    ("call", "get_time", "{}", "completed"),
]


def prompt_of(server: Any) -> str:
    return bytes(server.engine.requests[-1][0]).decode()


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_whole_and_streamed_are_the_same(piece):
    with saying(f"{THOUGHT}Let me look.\n{OSLO}\n{NOW}", piece=piece) as (_, client):
        whole = client.responses.create(model="fake", input="weather?", tools=TOOLS)
        with client.responses.stream(model="fake", input="weather?", tools=TOOLS) as stream:
            streamed = stream.get_final_response()

    assert items(whole.output) == items(streamed.output) == ALL
    assert whole.output_text == streamed.output_text == "Let me look."
    assert whole.status == streamed.status == "completed"
    assert whole.usage == streamed.usage
    assert whole.usage.input_tokens + whole.usage.output_tokens == whole.usage.total_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens == len(THOUGHT.rstrip())
    assert whole.usage.input_tokens_details.cached_tokens == 0
    ids = [item.id for item in [*whole.output, *streamed.output]]
    assert len(set(ids)) == 8
    calls = [item.call_id for item in whole.output[2:]]
    assert calls[0].startswith("call_") and calls[0] != calls[1]


def test_the_events_come_in_order_and_are_numbered():
    with saying(f"{THOUGHT}Let me look.\n{OSLO}", piece=9) as (_, client):
        events = list(
            client.responses.create(model="fake", input="hi", tools=TOOLS, stream=True)
        )  # fmt: skip

    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    unrepeated = [kind for n, kind in enumerate(kinds) if n == 0 or kinds[n - 1] != kind]
    assert unrepeated == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.output_index for event in events if "item.added" in event.type] == [0, 1, 2]
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert events[0].response.output == [] and events[0].response.usage is None
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Let me look."
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item for event in done] == events[-1].response.output
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in added] == [event.item.id for event in done]
    assert all(item.status == "in_progress" for item in added)
    assert (added[0].content, added[1].content, added[2].arguments) == ([], [], "")


def test_the_bytes_of_a_stream():
    with saying("Hi.", piece=1000) as (server, _), server.client() as client:
        text = client.post("/v1/responses", json={"input": "a", "stream": True}).text

    frames = text.removesuffix("\n\n").split("\n\n")
    names = [frame.split("\n")[0].removeprefix("event: ") for frame in frames]
    bodies = [json.loads(frame.split("\n")[1].removeprefix("data: ")) for frame in frames]
    assert names == [body["type"] for body in bodies]
    assert names[0] == "response.created" and names[-1] == "response.completed"
    assert bodies[0]["response"]["output"] == []


def test_what_was_asked_comes_back():
    requested: dict[str, Any] = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50,
        "temperature": 0.5, "top_p": 0.9, "reasoning": {"effort": "low"}, "user": "me",
        "parallel_tool_calls": False, "truncation": "auto", "max_tool_calls": 3,
        "prompt_cache_key": "k", "safety_identifier": "s", "store": False,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }  # fmt: skip
    with saying("Hi.") as (server, client):
        answer = client.responses.create(model="alias", input="a", **requested).to_dict()
        prompt = prompt_of(server)

    assert prompt == "<system>Be brief.\n<user>a\n<assistant>"
    for name, value in requested.items():
        assert answer[name] == (
            {"effort": "low", "summary": None} if name == "reasoning" else value
        )
    assert (answer["object"], answer["model"], answer["background"]) == ("response", "alias", False)
    assert (answer["tool_choice"], answer["tools"], answer["error"]) == ("auto", [], None)
    assert answer["id"].startswith("resp_")
    assert answer["completed_at"] >= answer["created_at"]


def test_a_conversation_of_items_becomes_a_chat():
    given = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Oslo."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "A moment.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "user", "content": "and now?"},
    ]  # fmt: skip
    with saying("Dry.") as (server, client):
        client.responses.create(model="fake", input=given, instructions="Be brief.")
        prompt = prompt_of(server)

    assert prompt == (
        "<system>Be brief.\n\nBe kind.\n<user>weather?\n<assistant>A moment.\n<tool>rain\n"
        "<user>and now?\n<assistant>"
    )


def test_a_tool_loop_from_call_to_answer():
    with saying(OSLO) as (server, client):
        first = client.responses.create(model="fake", input="weather?", tools=TOOLS)
        call = first.output[0]
        history = [{"role": "user", "content": "weather?"}, *first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
        server.engine.scripts[:] = ["It rains."]
        second = client.responses.create(model="fake", input=history, tools=TOOLS)

    assert items(first.output) == [ALL[2]]
    assert second.output_text == "It rains."


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ({"type": "function", "name": "get_weather"}, '{"city": "Oslo"}'),
        (
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "function", "name": "get_weather"}]},
            OSLO,
        ),
    ],
)  # fmt: skip
def test_a_tool_can_be_named(choice, script):
    with saying(script) as (server, client):
        answer = client.responses.create(
            model="fake", input="a", tools=TOOLS, tool_choice=choice
        )  # fmt: skip
        params = server.engine.requests[-1][1]

    assert items(answer.output) == [ALL[2]]
    assert params.grammar is not None
    assert answer.tool_choice.to_dict() == choice


def test_without_parallel_calls_there_is_one():
    with saying(f"{OSLO}\n{NOW}") as (_, client):
        answer = client.responses.create(
            model="fake", input="a", tools=TOOLS, parallel_tool_calls=False
        )  # fmt: skip
    assert items(answer.output) == [ALL[2]]


class City(BaseModel):
    city: str
    rains: bool


def test_a_schema_is_enforced_and_parsed():
    with saying('{"city": "Oslo", "rains": true}') as (server, client):
        parsed = client.responses.parse(model="fake", input="a", text_format=City)
        with client.responses.stream(model="fake", input="a", text_format=City) as stream:
            streamed = stream.get_final_response()
        grammar = server.engine.requests[-1][1].grammar
        schema = {"type": "object", "properties": {}}
        client.responses.create(
            model="fake", input="a",
            text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
        )  # fmt: skip
        client.responses.create(model="fake", input="a", text={"format": {"type": "json_object"}})

    assert parsed.output_parsed == streamed.output_parsed == City(city="Oslo", rains=True)
    assert grammar.kind == "json_schema" and "rains" in grammar.text
    assert parsed.text.format.to_dict()["strict"] is True


def test_an_answer_that_is_cut_is_incomplete():
    with saying("Hello there.") as (_, client):
        answer = client.responses.create(model="fake", input="a", max_output_tokens=5)
        events = list(
            client.responses.create(model="fake", input="a", max_output_tokens=5, stream=True)
        )

    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert items(answer.output) == [("text", "Hello", "incomplete")]
    assert events[-1].type == "response.incomplete"
    assert items(events[-1].response.output) == [("text", "Hello", "incomplete")]


def test_an_empty_answer_is_an_empty_text():
    with saying("") as (_, client):
        whole = client.responses.create(model="fake", input="a")
        with client.responses.stream(model="fake", input="a") as stream:
            streamed = stream.get_final_response()
    assert items(whole.output) == items(streamed.output) == [("text", "", "completed")]


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("script", ["Hi.", f"{THOUGHT}Hi."])
def test_logprobs_are_those_of_the_text(script, piece):
    """However many tokens come at once, be it the end of a thought and the text's beginning."""
    with saying(script, piece=piece) as (_, client):
        whole = client.responses.create(
            model="fake", input="a", include=["message.output_text.logprobs"], top_logprobs=2
        )
        events = list(
            client.responses.create(model="fake", input="a", top_logprobs=2, stream=True)
        )  # fmt: skip

    scores = whole.output[-1].content[0].logprobs
    assert [entry.token for entry in scores if entry.token] == list("Hi.")
    assert all(len(entry.top_logprobs) == 2 for entry in scores)
    assert scores[-1].logprob == -9999.0  # of the token that ends it, which has no text
    deltas = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    assert [entry.token for some in deltas for entry in some] == [e.token for e in scores]
    assert events[-1].response.output[-1].content[0].logprobs == scores
    assert EOS > 255


def test_truncation_drops_the_oldest_turns():
    turns: list[Any] = []
    for number in range(40):
        turns += [{"role": "user", "content": f"question {number}" + "." * 20},
                  {"role": "assistant", "content": "yes"}]  # fmt: skip
    turns.append({"role": "user", "content": "last"})
    with saying("Hi.") as (server, client):
        server.engine.max_model_len = 300
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input=turns)
        client.responses.create(
            model="fake", input=turns, truncation="auto", instructions="Be brief.",
            max_output_tokens=100,
        )  # fmt: skip
        prompt = prompt_of(server)

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    tails = ["".join(f"<{t['role']}>{t['content']}\n" for t in turns[n:]) for n in range(0, 82, 2)]
    wanted = [f"<system>Be brief.\n{tail}<assistant>" for tail in tails]
    assert prompt == next(text for text in wanted if len(text) <= 200)


@pytest.mark.parametrize(
    "fault", [GenerationFailed("broken numbers"), EngineDead("down"), ZeroDivisionError("secret")]
)
def test_a_stream_that_breaks_says_why(fault):
    engine = FakeEngine(error=fault, news_before_error=3)
    with running(engine) as server, server.client() as client:
        text = client.post("/v1/responses", json={"input": "a", "stream": True}).text
        whole = client.post("/v1/responses", json={"input": "a"})

    frames = text.removesuffix("\n\n").split("\n\n")
    error, failed = (json.loads(frame.partition("data: ")[2]) for frame in frames[-2:])
    same = whole.json()["error"]
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert [error[name] for name in ("code", "message", "param")] == [
        same[name] for name in ("code", "message", "param")
    ]
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": same["code"], "message": same["message"]}
    assert failed["sequence_number"] == error["sequence_number"] + 1 == len(frames) - 1
    assert "secret" not in text


def test_a_client_that_leaves_ends_its_work():
    engine = FakeEngine(hold_after=1)
    with running(engine) as server:
        with (
            server.client() as client,
            client.stream("POST", "/v1/responses", json={"input": "a", "stream": True}) as answer,
        ):
            assert next(answer.iter_lines()) == "event: response.created"
        server.wait_for(engine.aborts)
        server.wait_until_idle()
    assert len(engine.aborted) == 1


def test_aborted_by_id():
    engine = FakeEngine(hold_after=1)
    body = {"input": "a", "stream": True}
    with running(engine) as server, server.client() as client:
        headers = {"x-request-id": "mine"}
        with client.stream("POST", "/v1/responses", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            with httpx.Client(base_url=server.url) as other:
                done = other.post("/abort_requests", json={"request_ids": "mine"}).json()
            text = "\n".join(lines)
    assert done == {"aborted": 1, "not_found": []}
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
