"""A stream of thoughts and calls that breaks anywhere goes on as if it had not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol.endpoints import RESUME_HEADER, STREAM_HEADER
from octavo_engine.protocol.resume import BEGIN, LINE_PREFIX, Resume, pack
from tests.fakes.talking import HI, NOW, OSLO, THOUGHT, TOOLS, saying

if TYPE_CHECKING:
    import httpx


class Router:
    """What a router knows of a stream; kept apart from the router's own code."""

    def __init__(self) -> None:
        self.begin: dict[str, Any] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: list[int] = []
        self.clean: list[bytes] = []

    def read(self, event: bytes) -> None:
        lines = event.splitlines(keepends=True)
        clean = b"".join(line for line in lines if not line.startswith(LINE_PREFIX))
        self.clean.append(clean)
        for line in lines:
            if line.startswith(BEGIN):
                self.begin = json.loads(line[len(BEGIN) :])
            elif line.startswith(LINE_PREFIX):
                index, _, ids = line[len(LINE_PREFIX) :].decode().strip().partition(" ")
                known = self.tokens.setdefault(int(index), [])
                known += [int(token) for token in ids.split(",") if token]
                if b'"finish_reason":"' in clean:
                    self.finished.append(int(index))

    @property
    def resume(self) -> Resume:
        begin = self.begin
        tokens = [self.tokens.get(index, []) for index in range(begin["answers"])]
        return Resume(
            begin["id"], begin["created"], begin["seed"], tokens, self.finished, list(self.tokens)
        )


def events_of(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


TOLD = [f"{THOUGHT}I  look: \n{OSLO}\n {NOW}\n done ", f"{NOW}"]
BODY = {
    "messages": HI, "tools": TOOLS, "n": 2, "stream": True, "max_tokens": 400,
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def teller():
    with saying(*TOLD) as (server, _), server.client() as client:
        yield client


def ask(client: httpx.Client, content: bytes, **headers: str) -> list[bytes]:
    headers = {STREAM_HEADER: "tokens", "content-type": "application/json", **headers}
    answer = client.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    return events_of(answer.content)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(cut=st.floats(0, 1))
def test_a_resumed_stream_is_byte_for_byte_the_one_that_broke(teller, cut):
    body = json.dumps(BODY).encode()
    unbroken = Router()
    events = ask(teller, body, **{"x-request-id": "one"})
    for event in events:
        unbroken.read(event)
    router = Router()
    at = 1 + int(cut * (len(events) - 4))  # at least one event, not the usage
    for event in events[:at]:
        router.read(event)
    for event in ask(teller, pack(router.resume, body), **{RESUME_HEADER: "1"}):
        router.read(event)

    usage = [json.loads(event[6:])["usage"] for event in (router.clean[-2], unbroken.clean[-2])]
    for each in usage:
        each.pop("prompt_tokens_details")  # what another engine has cached is its own affair
    assert usage[0] == usage[1]
    assert usage[0]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT.rstrip())
    # Answers interleave as they come; each one's own events are the same.
    for index in range(2):
        mark = b'{"index":%d,"delta"' % index
        told, expected = (
            [event for event in each.clean if mark in event] for each in (router, unbroken)
        )
        assert told == expected
    assert router.tokens == unbroken.tokens
