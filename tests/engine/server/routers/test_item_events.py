"""A stream of items that breaks at any event and is resumed reads like one that never broke."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.protocol.endpoints import RESUME_HEADER, STREAM_HEADER
from octavo_engine.protocol.resume import Resume, pack
from octavo_engine.server.settings import ServerSettings
from octavo_router.proxy.resume import StreamMemory
from octavo_router.proxy.stream_form import MESSAGE_BLOCKS, RESPONSE_ITEMS
from octavo_router.residency import native
from tests.fakes.process import serving
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FORMS = {RESPONSES: RESPONSE_ITEMS, MESSAGES: MESSAGE_BLOCKS}
HERMES = ServerSettings(tool_call_parser="hermes", reasoning_parser="qwen3")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS: dict[str, list[dict[str, Any]]] = {
    RESPONSES: [{"type": "function", "name": "weather", "parameters": SCHEMA}],
    MESSAGES: [{"name": "weather", "input_schema": SCHEMA}],
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SCRIPTS = {
    "text": "The harbor is calm, and so am I.",
    "reasoning": "<think>\nWhich one?\n</think>\n\nThe second.",
    "calls": f"Let me see. {CALL}\n{CALL}",
    "all": f"<think>\nOslo.\n</think>\n\nOne moment. {CALL}\n{CALL}",
}


def memory_of(path: str) -> StreamMemory:
    hot = native.load()
    return StreamMemory(hot.split_token_lines, hot.find_event_end, form=FORMS[path])


def body_of(path: str, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": "weather?", "stream": True, **more}
    messages = [{"role": "user", "content": "weather?"}]
    return {"messages": messages, "max_tokens": 400, "model": "fake", "stream": True, **more}


def ask(client: httpx.Client, path: str, content: bytes, **headers: str) -> list[bytes]:
    """The events, with the lines for routers."""
    answer = client.post(
        path,
        content=content,
        headers={"content-type": "application/json", STREAM_HEADER: "tokens", **headers},
    )
    assert answer.status_code == 200, answer.text
    return [event + b"\n\n" for event in answer.content.split(b"\n\n") if event]


def reported(clean: bytes) -> list[dict[str, Any]]:
    """The events as a client understands them, whatever the pieces of what grows."""
    return told_from(0, clean)


def told_from(first: int, clean: bytes) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for number, event in enumerate(clean.split(b"\n\n")[:-1], first):
        data = json.loads(event.partition(b"data: ")[2])
        assert data.pop("sequence_number", number) == number
        for usage in (data.get("usage"), data.get("response", {}).get("usage")):
            if usage:  # what another engine has cached is its own affair
                for name in ("input_tokens", "cache_read_input_tokens", "input_tokens_details"):
                    usage.pop(name, None)
        data.get("response", {}).pop("completed_at", None)
        if not grows(joined[-1] if joined else {}, data):
            joined.append(data)
    return joined


def grows(last: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether `new` only adds to `last`, which then has both."""
    if "delta" not in new or {**last, "delta": 0} != {**new, "delta": 0}:
        return False
    if isinstance(new["delta"], str):
        last["delta"] += new["delta"]
        return True
    if last["delta"].keys() != new["delta"].keys() or new["type"] != "content_block_delta":
        return False
    for name in new["delta"].keys() - {"type"}:
        last["delta"][name] += new["delta"][name]
    return True


def check(client: httpx.Client, path: str, body: dict[str, Any], *, every: int = 1) -> None:
    """Cut after each event, and the streams that go on once more."""
    content = json.dumps(body).encode()
    unbroken = ask(client, path, content)
    whole = memory_of(path)
    expected = reported(whole.feed(b"".join(unbroken)))
    assert whole.is_done and len(unbroken) > 5
    rng = random.Random(1)
    for first_cut in range(1, len(unbroken), every):
        memory, stream, cut, relayed = memory_of(path), unbroken, first_cut, b""
        while cut < len(stream):
            relayed += memory.feed(b"".join(stream[:cut]))
            assert memory.can_resume
            memory.start_over()
            frame = memory.resume_body(content)
            stream = ask(client, path, frame, **{RESUME_HEADER: "1"})
            cut = rng.randint(1, 30)
        relayed += memory.feed(b"".join(stream))
        assert memory.is_done and not memory.problem
        seen = reported(relayed)
        # The one that is compared with began as another answer.
        text = json.dumps(seen).replace(memory.id, whole.id)
        if path == RESPONSES:
            assert strip_ids(seen) == strip_ids(expected)
        else:
            assert json.loads(text) == expected
        assert memory.num_tokens == whole.num_tokens


def strip_ids(events: list[dict[str, Any]]) -> list[Any]:
    """Each id by the order in which it was first seen: they must be used alike."""
    known: dict[str, int] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: known.setdefault(each, len(known))
                if name in ("id", "item_id", "call_id") and isinstance(each, str)
                else 0 if name == "created_at"
                else walk(each)
                for name, each in value.items()
            }  # fmt: skip
        if isinstance(value, list):
            return [walk(each) for each in value]
        return value

    return [walk(event) for event in events]


@pytest.mark.slow
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("piece", [1, 7])
def test_a_stream_goes_on_where_it_broke(path: str, script: str, piece: int):
    engine = ScriptedEngine(scripts=[SCRIPTS[script]], piece=piece)
    with running(engine, HERMES) as server, server.client() as client:
        check(client, path, body_of(path, seed=1, tools=TOOLS[path]), every=2 if piece == 1 else 1)


@pytest.fixture(scope="module")
def model() -> Iterator[httpx.Client]:
    with serving("m", "--sim-step-base-ms", "3") as server, server.client() as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (RESPONSES, {"max_output_tokens": 24}),
        (
            RESPONSES,
            {"max_output_tokens": 60, "tools": TOOLS[RESPONSES], "tool_choice": "required"},
        ),
        (MESSAGES, {"max_tokens": 24}),
        (MESSAGES, {"max_tokens": 40, "stop_sequences": ["er w", "ver", "e t"]}),
        (MESSAGES, {"max_tokens": 60, "tools": TOOLS[MESSAGES], "tool_choice": {"type": "any"}}),
    ],
)
def test_a_stream_of_a_real_scheduler_goes_on_where_it_broke(
    model: httpx.Client, path: str, more: dict[str, Any]
):
    body = body_of(path, seed=5, temperature=1.0, **more)
    body.pop("model", None)
    check(model, path, {**body, "model": "m"})


def test_a_stream_with_logprobs_is_not_resumed():
    """Those of the tokens so far are not known to the engine that would go on."""
    more = {"include": ["message.output_text.logprobs"]}
    with running(ScriptedEngine()) as server, server.client() as client:
        content = json.dumps(body_of(RESPONSES, **more)).encode()
        memory = memory_of(RESPONSES)
        events = ask(client, RESPONSES, content)
        assert memory.feed(b"".join(events)) and memory.is_done
        assert not any(b": octavo" in event for event in events)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pieces": []}, "pieces are missing"),
        ({"pieces": [2, 2]}, "pieces are not those"),
        ({"pieces": [0, 3]}, "pieces are not those"),
        ({"finished": [0]}, "pieces are not those"),
        ({"kv_address": "here"}, "kv_address is not HOST:PORT"),
        ({"events": -1}, "events is not a number"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(changes: dict[str, Any], problem: str):
    fields: dict[str, Any] = {"pieces": [1, 2], "events": 3, **changes}
    frame = pack(
        Resume("resp_1", 1, 5, [[97, 98, 99]], **fields), json.dumps(body_of(RESPONSES)).encode()
    )
    headers = {"content-type": "application/json", RESUME_HEADER: "1", STREAM_HEADER: "tokens"}
    with running(ScriptedEngine()) as server, server.client() as client:
        answer = client.post(RESPONSES, content=frame, headers=headers)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


@pytest.mark.slow
def test_text_that_was_held_back_until_the_end_came_with_the_last_piece(model: httpx.Client):
    """`cz` might have come: so `c` was sent with what ended the answer."""
    known = Resume("resp_1", 1, 5, [[*b"abc"]], pieces=[3], events=5)
    body = body_of(RESPONSES, max_output_tokens=3, stop=["cz"], model="m")
    stream = ask(model, RESPONSES, pack(known, json.dumps(body).encode()), **{RESUME_HEADER: "1"})
    rest = told_from(5, memory_of(RESPONSES).feed(b"".join(stream)))
    assert [event["type"] for event in rest] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert rest[0]["text"] == "abc"
