"""Answers and events keep to Open Responses: what its schema requires is there, and of its type."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.fakes.talking import OSLO, THOUGHT, saying

TEXT, NUMBER, WHOLE, FLAG = ({"type": name} for name in ("string", "number", "integer", "boolean"))


def maybe(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def of(kind: str = "", *, optional: tuple[str, ...] = (), **members: Any) -> dict[str, Any]:
    fixed = {"type": {"const": kind}} if kind else {}
    return {
        "type": "object", "properties": fixed | members,
        "required": [name for name in fixed | members if name not in optional],
    }  # fmt: skip


def listed(*items: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"anyOf": list(items)}}


STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
LOGPROB = of(token=TEXT, logprob=NUMBER, bytes=listed(WHOLE), top_logprobs=listed({}))
OUTPUT_TEXT = of("output_text", text=TEXT, annotations=listed({}), logprobs=listed(LOGPROB))
REASONING_TEXT = of("reasoning_text", text=TEXT)
ITEM = {
    "anyOf": [
        of("message", id=TEXT, status=STATUS, role={"const": "assistant"},
           content=listed(OUTPUT_TEXT)),
        of("function_call", id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=STATUS),
        of("reasoning", id=TEXT, summary=listed({}), content=listed(REASONING_TEXT),
           encrypted_content=TEXT, optional=("encrypted_content",)),
    ]
}  # fmt: skip
TOOL = of("function", name=TEXT, description=maybe(TEXT), parameters=maybe({"type": "object"}),
          strict=maybe(FLAG))  # fmt: skip
USAGE = of(
    input_tokens=WHOLE, output_tokens=WHOLE, total_tokens=WHOLE,
    input_tokens_details=of(cached_tokens=WHOLE), output_tokens_details=of(reasoning_tokens=WHOLE),
)  # fmt: skip
FORMAT = {
    "anyOf": [
        of("text"), of("json_object"),
        of("json_schema", name=TEXT, description=maybe(TEXT), strict=FLAG),
    ]
}  # fmt: skip
RESPONSE = of(
    id=TEXT, object={"const": "response"}, created_at=WHOLE, completed_at=maybe(WHOLE),
    status=TEXT, incomplete_details=maybe(of(reason=TEXT)), model=TEXT,
    previous_response_id=maybe(TEXT), instructions=maybe(TEXT), output=listed(ITEM),
    error=maybe(of(code=TEXT, message=TEXT)), tools=listed(TOOL),
    tool_choice={"anyOf": [{"enum": ["none", "auto", "required"]}, of("function"),
                           of("allowed_tools", tools=listed({}), mode=TEXT)]},
    truncation={"enum": ["auto", "disabled"]}, parallel_tool_calls=FLAG,
    text=of(format=FORMAT, verbosity={"enum": ["low", "medium", "high"]}), top_p=NUMBER,
    presence_penalty=NUMBER, frequency_penalty=NUMBER, top_logprobs=WHOLE, temperature=NUMBER,
    reasoning=maybe(of(effort=maybe(TEXT), summary=maybe(TEXT))), user=maybe(TEXT),
    usage=maybe(USAGE), max_output_tokens=maybe(WHOLE), max_tool_calls=maybe(WHOLE), store=FLAG,
    background=FLAG, service_tier=TEXT, metadata={"type": "object"},
    safety_identifier=maybe(TEXT), prompt_cache_key=maybe(TEXT),
)  # fmt: skip
AT = {"item_id": TEXT, "output_index": WHOLE}
PART = {**AT, "content_index": WHOLE}
EVENTS: dict[str, dict[str, Any]] = {
    **{
        f"response.{state}": {"response": RESPONSE}
        for state in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": {"output_index": WHOLE, "item": ITEM},
    "response.output_item.done": {"output_index": WHOLE, "item": ITEM},
    "response.content_part.added": {**PART, "part": {"anyOf": [OUTPUT_TEXT, REASONING_TEXT]}},
    "response.content_part.done": {**PART, "part": {"anyOf": [OUTPUT_TEXT, REASONING_TEXT]}},
    "response.output_text.delta": {**PART, "delta": TEXT, "logprobs": listed(LOGPROB)},
    "response.output_text.done": {**PART, "text": TEXT, "logprobs": listed(LOGPROB)},
    "response.function_call_arguments.delta": {**AT, "delta": TEXT},
    "response.function_call_arguments.done": {**AT, "arguments": TEXT},
    # OpenAI's names, which its clients know; Open Responses calls them response.reasoning.*
    "response.reasoning_text.delta": {**PART, "delta": TEXT},
    "response.reasoning_text.done": {**PART, "text": TEXT},
}  # fmt: skip

WEATHER = {
    "type": "function", "name": "get_weather", "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello there.", {"input": [user("Say hello.")]}),
    "system prompt": ("Arr.", {"input": [
        {"type": "message", "role": "system", "content": "You are a pirate."}, user("Hello.")]}),
    "tool": (OSLO, {"input": [user("Weather?")], "tools": [WEATHER]}),
    "bare tool": (OSLO, {
        "input": "Weather?", "tools": [{"type": "function", "name": "get_weather"}],
        "tool_choice": {"type": "function", "name": "get_weather"}}),
    "turns": ("Alice.", {"input": [
        user("I am Alice."), {"type": "message", "role": "assistant", "content": "Hello Alice!"},
        user("Who am I?")]}),
    "thoughts": (f"{THOUGHT}Hm.", {"input": "Think."}),
    "format": ("{}", {"input": "JSON.", "text": {"format": SCHEMA}, "presence_penalty": 0.5}),
    "logprobs": ("Hm.", {"input": "Hm.", "top_logprobs": 2, "max_output_tokens": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_whole_answer_has_all_that_the_schema_requires(name: str) -> None:
    script, body = CASES[name]
    with saying(script) as (server, _):
        answer = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    jsonschema_rs.validate(RESPONSE, answer.json())


@pytest.mark.parametrize("name", CASES)
def test_every_event_has_all_that_the_schema_requires(name: str) -> None:
    script, body = CASES[name]
    with saying(script, piece=3) as (server, _):
        answer = httpx.post(f"{server.url}/v1/responses", json={**body, "stream": True}, timeout=60)
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    assert len(frames) > 4
    for number, frame in enumerate(frames):
        event = json.loads(frame.partition("\ndata: ")[2])
        members = EVENTS[event["type"]]
        jsonschema_rs.validate(
            of(event["type"], sequence_number={"const": number}, **members), event
        )
