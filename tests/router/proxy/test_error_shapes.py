"""The router's own refusals have the form that the clients of a path read, whole and in streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.errors import RequestError
from octavo_engine.server.http.error_shapes import anthropic_type
from octavo_router.errors import Rejected
from octavo_router.flow.keys import KeyTable
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, closed_port

MESSAGES = "/v1/messages"
BODY = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def error_of(body: bytes) -> dict[str, Any]:
    """What Anthropic's clients read; nothing else is in it."""
    whole = json.loads(body)
    assert whole.keys() == {"type", "error", "request_id"}
    assert whole["type"] == "error"
    assert whole["error"].keys() == {"type", "message"}
    return {**whole["error"], "request_id": whole["request_id"]}


@pytest.mark.parametrize(
    ("path", "body", "more", "status", "kind"),
    [
        (MESSAGES, b"{", "", 400, "invalid_request_error"),
        (MESSAGES, BODY | {"model": "who"}, "", 404, "not_found_error"),
        (MESSAGES, BODY, "transfer-encoding: x\r\n", 400, "invalid_request_error"),
        (MESSAGES + "/nowhere", BODY, "", 404, "not_found_error"),
        (MESSAGES, b" " * 3000, "", 413, "request_too_large"),
        (MESSAGES + "/count_tokens", BODY, "", 503, "overloaded_error"),
        (MESSAGES, BODY, "", 503, "overloaded_error"),  # nobody can be reached
    ],
)
def test_refusals_of_messages_are_anthropics(path, body, more, status, kind):
    @on_loop
    async def ask() -> None:
        config = fast_config(limits={"max_body_bytes": 2048})
        async with (
            routing_to(closed_port(), config=config) as rig,
            await RawClient.open(rig.port) as client,
        ):
            answer = await client.ask(body, path, more)
            assert answer.status == status
            error = error_of(answer.body)
            assert error["type"] == kind
            assert error["request_id"] == answer.header("x-request-id")
            assert answer.header("request-id") == answer.header("x-request-id")
            assert (answer.header("retry-after") is not None) == (status == 503)
            await rig.settled()

    ask()


@on_loop
async def test_without_a_key_too():
    table = KeyTable({}, is_required=True)
    async with (
        routing_to(closed_port(), table=table) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(BODY, MESSAGES)
        assert answer.status == 401
        assert error_of(answer.body)["type"] == "authentication_error"


@on_loop
async def test_all_other_paths_keep_openais():
    async with routing_to(closed_port()) as rig:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messagesx"):
            async with await RawClient.open(rig.port) as client:
                answer = await client.ask(b"{", path)
                assert answer.json.keys() == {"error"}
                assert answer.header("request-id") is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 429, 500, 502, 503, 504])
def test_the_words_are_those_of_the_engine(status):
    error = Rejected(status, "code", "message")
    theirs = RequestError("message")
    theirs.status, theirs.type = error.status, error.type
    assert error_of(error.body(MESSAGES, "r"))["type"] == anthropic_type(theirs)


@pytest.mark.parametrize("path", [MESSAGES, "/v1/responses", "/v1/chat/completions"])
def test_a_stream_that_breaks_ends_in_its_paths_words(path):
    async def breaks(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(b'event: ping\ndata: {"type": "ping"}\n\n')
        peer.close()

    @on_loop
    async def ask() -> None:
        async with (
            ScriptedUpstream(breaks) as upstream,
            routing_to(upstream.port) as rig,
            await RawClient.open(rig.port) as client,
        ):
            body = chat(stream=True) if "chat" in path else BODY | {"input": "x", "stream": True}
            answer = await client.ask(body, path)
            _, _, end = answer.body.partition(b"\n\n")
            if path == "/v1/chat/completions":
                data, done = end.removesuffix(b"\n\n").split(b"\n\n")
                assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "upstream_lost"
                assert done == b"data: [DONE]"
                return
            name, data = end.removesuffix(b"\n\n").split(b"\n")
            assert name == b"event: error"
            if path == MESSAGES:
                assert error_of(data.removeprefix(b"data: "))["type"] == "api_error"
            else:
                event = json.loads(data.removeprefix(b"data: "))
                assert (event["type"], event["code"]) == ("error", "upstream_lost")
            await rig.settled()

    ask()
