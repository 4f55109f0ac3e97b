"""The real engine under real grammars: a model that talks nonsense calls tools as it must.

The simulator's words are random, so whatever is right about an answer the grammar has seen to.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from octavo_engine.protocol.endpoints import RESUME_HEADER, STREAM_HEADER
from octavo_engine.protocol.resume import BEGIN, LINE_PREFIX, Resume, pack
from tests.fakes.process import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

HI = [{"role": "user", "content": "weather?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CITY, "strict": True},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module", params=["hermes", "none", "auto"])
def url(request) -> Iterator[str]:
    flags = ("--tool-call-parser", request.param, "--sim-time-scale", "0.05")
    with serving("m", "--served-model-name", "sim", *flags) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client:
        yield client


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    assert arguments["city"] in ("Oslo", "Rome")
    assert isinstance(arguments["days"], int) and arguments["days"] <= 9


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_must_be_made_is_made(client, choice, seed):
    requested: dict[str, Any] = {
        "model": "sim", "messages": HI, "tools": [WEATHER], "tool_choice": choice, "seed": seed,
        "parallel_tool_calls": False, "max_tokens": 400,
    }  # fmt: skip
    answer = client.chat.completions.create(**requested)
    arguments = ""
    names = []
    finish = None
    for chunk in client.chat.completions.create(**requested, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments += call.function.arguments or ""
            names += [call.function.name] if call.function.name else []
        finish = chunk.choices[0].finish_reason or finish

    (call,) = answer.choices[0].message.tool_calls
    check_arguments(call.function.arguments)
    assert answer.choices[0].message.content is None
    assert (names, arguments) == (["get_weather"], call.function.arguments)
    assert finish == answer.choices[0].finish_reason
    assert finish == ("stop" if choice is NAMED else "tool_calls")


def test_a_schema_is_kept_whole_and_streamed(client):
    requested: dict[str, Any] = {
        "model": "sim", "messages": HI, "seed": 5, "max_tokens": 300,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True},
        },
    }  # fmt: skip
    answer = client.chat.completions.create(**requested)
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**requested, stream=True)
    )

    assert text == answer.choices[0].message.content
    check_arguments(text)
    assert answer.choices[0].finish_reason == "stop"


def test_completions_keep_a_choice_too(client):
    answer = client.completions.create(
        model="sim", prompt="Well?", max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["certainly", "never"]}},
    )  # fmt: skip

    assert answer.choices[0].text in ("certainly", "never")
    assert answer.choices[0].finish_reason == "stop"


# ── resumed ──


def read(stream: bytes) -> list[tuple[list[int], str, dict[str, Any]]]:
    """Of each event of the one answer: its new tokens, what it says, its delta."""
    events = []
    for event in stream.split(b"\n\n"):
        ids: list[int] = []
        for line in event.splitlines():
            if line.startswith(LINE_PREFIX) and not line.startswith(BEGIN):
                _, _, reported = line[len(LINE_PREFIX) :].decode().partition(" ")
                ids = [int(token) for token in reported.split(",") if token]
            elif line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                events.append((ids, choice["finish_reason"] or "", choice["delta"]))
    return events


def joined(events: list[tuple[list[int], str, dict[str, Any]]]) -> dict[str, Any]:
    result: dict[str, Any] = {"ids": [], "roles": 0, "calls": [], "ends": []}
    for ids, end, delta in events:
        result["ids"] += ids
        result["roles"] += "role" in delta
        result["ends"] += [end] if end else []
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                result["calls"].append([call["id"], call["function"]["name"], ""])
            result["calls"][call["index"]][2] += call["function"]["arguments"]
    return result


def test_a_broken_stream_of_calls_goes_on_exactly(url):
    body = json.dumps({
        "messages": HI, "tools": [WEATHER], "tool_choice": "required", "stream": True,
        "max_tokens": 300, "parallel_tool_calls": False,
    }).encode()  # fmt: skip
    headers = {STREAM_HEADER: "tokens", "content-type": "application/json"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        stream = client.post("/v1/chat/completions", content=body).content
        begin = json.loads(stream.split(b"\n")[0].removeprefix(BEGIN))
        events = read(stream)
        expected = joined(events)
        # Tokens that come while the server is busy share an event.
        assert len(events) > 2 and sum(len(ids) for ids, _, _ in events) > 8
        for cut in range(1, len(events) - 1, 5):
            tokens = [token for ids, _, _ in events[:cut] for token in ids]
            known = Resume(begin["id"], begin["created"], begin["seed"], [tokens], [], [0])
            rest = client.post(
                "/v1/chat/completions", content=pack(known, body), headers={RESUME_HEADER: "1"}
            )
            assert rest.status_code == 200, rest.text
            assert joined([*events[:cut], *read(rest.content)]) == expected
