"""Whatever two parsers could read differently is refused, and the connection with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo_router.config.settings import KeyConfig
from octavo_router.flow.keys import make_table
from tests.fakes.bad_http import (
    BAD_CHUNKS,
    BAD_REQUESTS,
    CHUNKED,
    GET,
    GOOD_CHUNKS,
    HOST,
    JSON,
    POST,
    UPGRADES,
)
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import CHAT, ScriptedUpstream


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


@pytest.mark.parametrize("chunks", GOOD_CHUNKS.values(), ids=list(GOOD_CHUNKS))
@on_loop
async def test_extensions_and_trailers_are_dropped_and_what_follows_is_the_next_request(chunks):
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        body = chunks.replace(b"{}", json.dumps(chat()).encode())
        body = body.replace(b"2", b"%x" % len(json.dumps(chat())), 1)
        await client.send(CHUNKED + body + post_bytes(chat("next")))
        for text in ("hi", "next"):
            assert (await client.answer()).status == 200
            assert upstream.requests[-1].json == chat(text)
            assert upstream.requests[-1].header("x-trailer") is None


@pytest.mark.parametrize("offer", UPGRADES.values(), ids=list(UPGRADES))
@on_loop
async def test_an_offer_of_another_protocol_is_passed_over(offer: bytes):
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for _ in range(2):
            answer = await client.ask(chat(), more=offer.decode())
            assert (answer.status, answer.json) == (200, CHAT)
            for name in ("connection", "upgrade", "http2-settings"):
                assert upstream.requests[-1].header(name) is None


@pytest.mark.parametrize("target", ["http://x", "HTTPS://x:8080", "http://[::1]:80"])
@on_loop
async def test_a_target_with_scheme_and_host_is_taken_by_its_path(target: str):
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port, routes=OK) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.get(f"{target}/health?a=b")).status == 200
        answer = await client.ask(chat(), f"{target}/v1/chat/completions?c")
        assert answer.status == 200
        assert upstream.requests[-1].line == b"POST /v1/chat/completions?c HTTP/1.1"
        assert upstream.requests[-1].header("host") == f"127.0.0.1:{upstream.port}"
        assert (await client.get(target)).code == "route_not_found"
        assert (await client.get(f"{target}?x")).code == "route_not_found"


@pytest.mark.parametrize("key", ["", "k"], ids=["no key", "without its key"])
@on_loop
async def test_requests_at_once_with_garbage_behind_leave_no_trace_in_the_log(key, caplog):
    table = make_table([KeyConfig(tenant="a", key=key)], {}) if key else None
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, reported: complaints.append(reported)
    )
    async with ScriptedUpstream() as upstream, routing_to(upstream.port, table=table) as rig:
        for garbage in (b"\x00\xff\r\n\r\n", b"GARBAGE\r\n\r\n", b"\n\n\n", b"\r\n\r\n\r\n"):
            for count in (1, 2, 3):
                for end in (0, 1, 2):
                    async with await RawClient.open(rig.port) as client:
                        sent = post_bytes(chat()) * count + garbage
                        for piece in (sent[: len(sent) - end], sent[len(sent) - end :]):
                            await client.send(piece)
                            await asyncio.sleep(0.001)
                        statuses = [(await client.answer()).status for _ in range(count)]
                        assert statuses == [401 if key else 200] * count
                        assert (await client.answer()).status == 400
                        assert await client.ended() == b""
        assert complaints == []
        assert [one for one in caplog.records if one.exc_info] == []


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"CONNECT x:443 HTTP/1.1\r\n" + HOST + b"\r\n", 405, "method_not_allowed"),
        (b"TRACE /health HTTP/1.1\r\n" + HOST + b"\r\n", 405, "method_not_allowed"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version"),
        (b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n", 505, "http_version"),
        (GET + b"Expect: a miracle\r\n\r\n", 417, "expectation_failed"),
        (POST + HOST + b"Content-Encoding: gzip\r\n\r\n", 415, "unsupported_media_type"),
        (GET.replace(b"/health", b"/" + b"x" * 8192) + b"\r\n", 414, "url_too_long"),
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
async def test_a_file_may_be_larger_than_other_bodies_and_is_bounded_too():
    """OpenAI takes audio of 25 MB."""
    async with ScriptedUpstream(take_file) as upstream, routing_to(upstream.port) as rig:
        head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\ncontent-type: a/b\r\n"
        for size, status in ((25_000_000, 200), (27 * 2**20, 413)):
            async with await RawClient.open(rig.port) as client:
                client.writer.write(head + b"content-length: %d\r\n\r\n" % size)
                if status == 200:
                    client.writer.write(b"x" * size)
                assert (await client.answer()).status == status
        async with await RawClient.open(rig.port) as client:
            client.writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(27):
                client.writer.write(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
            assert (await client.answer()).status == 413


@on_loop
async def test_a_chunked_body_is_counted_as_it_comes():
    async with routing_to(1) as rig, await RawClient.open(rig.port) as client:
        await client.send(CHUNKED)
        piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
        for _ in range(129):
            client.writer.write(piece)
        answer = await client.answer()
        assert (answer.status, answer.code) == (413, "body_too_large")


async def take_file(peer, request):
    await peer.answer(b"{}")


def _ok(request):
    from octavo_router.http.messages import Reply

    return Reply.json({})


OK = {("GET", "/health"): _ok}
