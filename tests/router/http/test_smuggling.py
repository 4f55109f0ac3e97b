"""Whatever two parsers could read differently is refused, and the connection with it."""

from __future__ import annotations

import pytest

from tests.fakes.bad_http import BAD_CHUNKS, BAD_REQUESTS, CHUNKED, GET, HOST, JSON, POST
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import ScriptedUpstream


@pytest.mark.parametrize("data", BAD_REQUESTS.values(), ids=list(BAD_REQUESTS))
@on_loop
async def test_it_is_refused_and_nothing_behind_it_is_read(data: bytes):
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.send(data + post_bytes(chat("smuggled")))
        answer = await client.answer()
        assert answer.status == 400, answer
        assert answer.header("connection") == "close"
        assert answer.code == "invalid_http"
        assert await client.ended() == b""
        assert upstream.requests == []


@pytest.mark.parametrize("chunks", BAD_CHUNKS.values(), ids=list(BAD_CHUNKS))
@on_loop
async def test_chunks_are_read_strictly(chunks: bytes):
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.send(CHUNKED + chunks + post_bytes(chat("smuggled")))
        answer = await client.answer()
        assert answer.status == 400
        assert answer.header("connection") == "close"
        assert await client.ended() == b""
        assert upstream.requests == []


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"CONNECT x:443 HTTP/1.1\r\n" + HOST + b"\r\n", 405, "method_not_allowed"),
        (b"TRACE /health HTTP/1.1\r\n" + HOST + b"\r\n", 405, "method_not_allowed"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version"),
        (b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n", 505, "http_version"),
        (GET + b"Expect: a miracle\r\n\r\n", 417, "expectation_failed"),
        (POST + HOST + b"Content-Encoding: gzip\r\n\r\n", 415, "content_encoding"),
        (GET.replace(b"/health", b"/" + b"x" * 8192) + b"\r\n", 414, "uri_too_long"),
        (GET + b"A: b\r\n" * 100 + b"\r\n", 431, "headers_too_large"),
        (GET + b"A: " + b"x" * 16384 + b"\r\n\r\n", 431, "headers_too_large"),
        (GET + b"A: " + b"x" * 20000, 431, "headers_too_large"),
        (POST + HOST + JSON + b"Content-Length: 8388609\r\n\r\n", 413, "body_too_large"),
    ],
)  # fmt: skip
@on_loop
async def test_what_goes_beyond_a_limit_gets_its_own_status_and_the_close(data, status, code):
    async with (
        routing_to(1) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.send(data)
        answer = await client.answer()
        assert (answer.status, answer.code) == (status, code)
        assert answer.header("connection") == "close"
        assert await client.ended() == b""


@on_loop
async def test_what_is_unusual_and_clear_is_taken():
    ordinary = [
        b"\r\n" + GET + b"\r\n",  # the rest of the body before, as some clients send it
        b"GET /health HTTP/1.1\r\nhOsT: x\r\nA:b\r\nC:\t d \t\r\nE:\r\n\r\n",
        b"GET /health?a=b&c=%20 HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n",
        GET + b"A: \xe9\xff\r\n\r\n",
        GET + b"Content-Length: 0\r\n\r\n",
    ]
    async with routing_to(1, routes=OK) as rig, await RawClient.open(rig.port) as client:
        for data in ordinary:
            await client.send(data)
            assert (await client.answer()).status == 200, data


@on_loop
async def test_a_body_in_too_many_chunks_is_refused():
    async with routing_to(1) as rig, await RawClient.open(rig.port) as client:
        await client.send(CHUNKED + b"1\r\n \r\n" * 4097)
        answer = await client.answer()
        assert (answer.status, answer.code) == (400, "too_many_chunks")


@on_loop
async def test_a_chunked_body_is_counted_as_it_comes():
    async with routing_to(1) as rig, await RawClient.open(rig.port) as client:
        await client.send(CHUNKED)
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        for _ in range(129):
            client.writer.write(piece)
        answer = await client.answer()
        assert (answer.status, answer.code) == (413, "body_too_large")


def _ok(request):
    from octavo_router.http.messages import Reply

    return Reply.json({})


OK = {("GET", "/health"): _ok}
