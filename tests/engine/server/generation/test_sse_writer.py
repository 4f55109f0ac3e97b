"""A stream's bytes do not depend on which way its events took out of the server."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_engine.core.text.outputs import CompletionOutput
from octavo_engine.server.app import build_app
from octavo_engine.server.http.connection import CycleLine
from octavo_engine.server.http.exchange import LINE
from octavo_engine.server.http.sse import Chunks
from octavo_engine.server.settings import ServerSettings
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLS = 'Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
THINKS = "<think>hm, so</think>Hello there."

ASKED: list[tuple[str, str, dict[str, Any]]] = [
    (COMPLETIONS, "Hello there.", {"prompt": "a"}),
    (COMPLETIONS, "Hello there.", {"prompt": "a", "n": 2}),
    (COMPLETIONS, "Hello there.", {"prompt": "a", "logprobs": 2, "return_token_ids": True}),
    (COMPLETIONS, "Hello there.", {"prompt": "a", "echo": True}),
    (CHAT, "Hello there.", {"messages": HELLO}),
    (CHAT, "Hello there.", {"messages": HELLO, "stream_options": {
        "include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, CALLS, {"messages": HELLO, "tools": [WEATHER]}),
    (CHAT, THINKS, {"messages": HELLO, "n": 2}),
]  # fmt: skip
SETTINGS = ServerSettings(tool_call_parser="hermes", reasoning_parser="qwen3")


class Faucet:
    """A Line that is open as often as it is told."""

    def __init__(self, opens: Iterable[bool], written: list[bytes]) -> None:
        self._opens: Iterator[bool] = iter(opens)
        self._written = written
        self.count = 0

    @property
    def has_come(self) -> bool:
        return True

    @property
    def is_open(self) -> bool:
        return bool(self._written) and next(self._opens)

    def write(self, payload: bytes) -> None:
        assert payload, "an empty chunk ends the answer"
        self.count += 1
        self._written.append(payload)

    def watch(self, left: Callable[[], None]) -> None:
        pass  # this client stays

    def unwatch(self, left: Callable[[], None]) -> None:
        pass


def stream(
    path: str, says: str, requested: dict[str, Any], opens: Iterable[bool] | None
) -> tuple[bytes, int]:
    """The bytes of an answer, and how many pieces of it went past the server's own way."""
    written: list[bytes] = []
    faucet = Faucet(opens or (), written)
    body = json.dumps({"stream": True, "ignore_eos": False, **requested}).encode()
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"one")]
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": headers,
    }  # fmt: skip
    if opens is not None:
        scope["extensions"] = {LINE: faucet}

    async def test() -> None:
        app = build_app(ScriptedEngine(scripts=[says]), SETTINGS)
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if unread:
                return unread.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                written.append(message["body"])
            else:
                assert message["status"] == 200

        await app(scope, receive, send)

    asyncio.run(test())
    return re.sub(rb'"created":\d+', b'"created":0', b"".join(written)), faucet.count


@pytest.mark.parametrize(("path", "says", "requested"), ASKED, ids=lambda value: str(value)[:50])
def test_bytes_are_the_same_however_they_go(path, says, requested):
    expected, _ = stream(path, says, requested, None)
    assert expected.endswith(b"data: [DONE]\n\n")

    through, count = stream(path, says, requested, itertools.repeat(True))
    assert count > 3
    assert without_ids(through) == without_ids(expected)

    pattern = itertools.cycle([True, False, False, True, True, False])
    mixed, _ = stream(path, says, requested, pattern)
    assert without_ids(mixed) == without_ids(expected)


def without_ids(answer: bytes) -> bytes:
    """Ids of calls are new each time."""
    return re.sub(rb'"call_\w+"', b'"call"', answer)


def test_over_a_socket_most_events_take_the_short_way(monkeypatch):
    """And come out framed as the server frames its own."""
    written: list[bytes] = []
    write = CycleLine.write

    def counted(self: CycleLine, payload: bytes) -> None:
        written.append(payload)
        write(self, payload)

    monkeypatch.setattr(CycleLine, "write", counted)
    with running(ScriptedEngine(scripts=["Hello there."])) as server, server.client() as client:
        answer = client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": 64})
        again = client.post(COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": 64})

    for body in (answer.content, again.content):
        events = body.split(b"\n\n")
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
        assert "".join(texts) == "Hello there."
        assert events[-2:] == [b"data: [DONE]", b""]
    assert len(written) == 2 * (len("Hello there.") - 1)  # all but the first, and the end


@given(text=st.text(), index=st.integers(0, 300), chat=st.booleans())
def test_a_chunk_of_mere_text_is_as_any_other(text, index, chat):
    chunks = Chunks(id='a"b', model="m\u00e9", created=5, chat=chat, role="assistant")
    slow = chunks.delta(index, CompletionOutput(index), text)
    assert chunks.text(index, text) == slow
    choice = json.loads(slow.removeprefix(b"data: "))["choices"][0]
    assert choice["index"] == index
    assert (choice["delta"]["content"] if chat else choice["text"]) == text
