"""A stream of thoughts and calls that breaks anywhere goes on as if it had not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol.endpoints import RESUME_HEADER, STREAM_HEADER
from octavo_engine.protocol.resume import pack
from tests.fakes.stream_reader import StreamReader, events_of
from tests.fakes.talking import HI, NOW, OSLO, THOUGHT, TOOLS, saying

if TYPE_CHECKING:
    import httpx


OUTPUTS = [f"{THOUGHT}I  look: \n{OSLO}\n {NOW}\n done ", f"{NOW}"]
BODY = {
    "messages": HI, "tools": TOOLS, "n": 2, "stream": True, "max_tokens": 400,
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def teller():
    with saying(*OUTPUTS) as (server, _), server.client() as client:
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
    unbroken = StreamReader()
    events = ask(teller, body, **{"x-request-id": "one"})
    for event in events:
        unbroken.read(event)
    router = StreamReader()
    at = 1 + int(cut * (len(events) - 4))  # at least one event, not the usage
    for event in events[:at]:
        router.read(event)
    for event in ask(teller, pack(router.resume, body), **{RESUME_HEADER: "1"}):
        router.read(event)

    usage = [json.loads(event[6:])["usage"] for event in (router.events[-2], unbroken.events[-2])]
    for each in usage:
        each.pop("prompt_tokens_details")  # what another engine has cached is its own affair
    assert usage[0] == usage[1]
    assert usage[0]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT.rstrip())
    # Answers interleave as they come; each one's own events are the same.
    for index in range(2):
        mark = b'{"index":%d,"delta"' % index
        reported, expected = (
            [event for event in each.events if mark in event] for each in (router, unbroken)
        )
        assert reported == expected
    assert router.tokens == unbroken.tokens
