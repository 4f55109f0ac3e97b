"""A request goes to an engine and its answer comes back: whole, streamed, kept alive, in order."""

from __future__ import annotations

import asyncio
import json

from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream, event


@on_loop
async def test_the_answer_comes_back_and_the_request_was_passed_on_byte_for_byte():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        body = (
            b'{ "model":"m",  "messages":[{"role":"user","content":"\xc3\xa4"}],"temperature":1.0}'
        )
        answer = await client.ask(body)

        assert answer.status == 200
        assert answer.json == CHAT
        assert answer.header("x-served-by") == f"127.0.0.1:{upstream.port}"
        [request] = upstream.requests
        assert request.line == b"POST /v1/chat/completions HTTP/1.1"
        assert request.body == body
        assert request.header("host") == f"127.0.0.1:{upstream.port}"
        assert request.header("x-request-id") == answer.header("x-request-id")
        await rig.settled()
        [record] = rig.records
        assert (record.status, record.outcome, record.attempts) == (200, "ok", 1)
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (10, 6, 4)


@on_loop
async def test_both_connections_are_kept_and_used_again():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for _ in range(5):
            assert (await client.ask(chat())).status == 200

        assert len(upstream.peers) == 1
        assert len(upstream.requests) == 5


@on_loop
async def test_pipelined_requests_are_answered_in_order():
    async def echo(peer: Peer, request: Received) -> None:
        await peer.answer(json.dumps(request.json["messages"][0]["content"]).encode())

    async with (
        ScriptedUpstream(echo) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.send(b"".join(post_bytes(chat(f"number {i}")) for i in range(20)))

        assert [(await client.answer()).json for _ in range(20)] == [
            f"number {i}" for i in range(20)
        ]


@on_loop
async def test_a_stream_is_relayed_event_by_event_as_it_comes():
    go_on = asyncio.Event()

    async def two_words(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(event("hel"))
        await go_on.wait()
        await peer.chunk(event("lo") + b"data: [DONE]\n\n")
        await peer.end_stream()

    async with (
        ScriptedUpstream(two_words) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(chat(stream=True))
        head = await client.head()
        assert head.header("transfer-encoding") == "chunked"
        assert head.header("content-type") == "text/event-stream"
        assert await client.chunk() == event("hel")  # while the engine has not gone on yet
        go_on.set()
        assert await client.chunk() == event("lo") + b"data: [DONE]\n\n"
        assert await client.chunk() == b""
        await rig.settled()
        assert rig.records[0].is_stream
        assert rig.records[0].ttft_s is not None


@on_loop
async def test_a_stream_split_at_every_byte_arrives_whole():
    stream = event("a\u00e9\U0001f600") + b": comment\r\n\r\ndata: x\r\n\r\n" + b"data: [DONE]\n\n"

    async def byte_by_byte(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        for i in range(len(stream)):
            await peer.chunk(stream[i : i + 1])
            await asyncio.sleep(0)
        await peer.end_stream()

    async with (
        ScriptedUpstream(byte_by_byte) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat(stream=True))
        assert answer.body == stream


@on_loop
async def test_a_client_of_http_1_0_gets_no_chunks_and_the_close_ends_its_answer():
    async with ScriptedUpstream() as upstream, routing_to(upstream.port) as rig:
        for stream in (False, True):
            async with await RawClient.open(rig.port) as client:
                body = json.dumps(chat(stream=stream)).encode()
                head = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
                await client.send(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                answer = await client.answer()
                assert answer.status == 200
                assert answer.header("transfer-encoding") is None
                assert answer.header("connection") == "close"
                assert await client.ended() == b""


@on_loop
async def test_a_chunked_body_reaches_the_engine_with_its_length():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        body = json.dumps(chat()).encode()
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for i in range(0, len(body), 7):
            piece = body[i : i + 7]
            await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
        assert upstream.requests[0].body == body


@on_loop
async def test_who_expects_to_be_told_to_continue_is_told():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        body = json.dumps(chat()).encode()
        head, _ = post_bytes(body, more="expect: 100-continue\r\n").split(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        assert (await client.answer()).status == 200
        assert upstream.requests[0].header("expect") is None


@on_loop
async def test_hop_by_hop_and_internal_fields_end_here():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        more = (
            "connection: keep-alive, x-mine\r\nx-mine: 1\r\nkeep-alive: 5\r\nte: trailers\r\n"
            "x-octavo-stream: tokens\r\nx-octavo-resume: 1\r\nx-octavo-pod-uid: p\r\n"
            "x-forwarded-for: 1.2.3.4\r\nforwarded: for=1\r\nx-gateway-destination-endpoint: e\r\n"
            "x-some-endpoint: e\r\nx-tenant: t\r\nx-request-priority: 0\r\n"
            "x-kept: yes\r\nauthorization: Bearer k\r\ntraceparent: 00-1-2-01\r\n"
        )
        assert (await client.ask(chat(), more=more)).status == 200
        names = {name for name, _ in upstream.requests[0].headers}
        assert names == {
            "host", "content-type", "x-kept", "authorization", "traceparent", "x-request-id",
            "content-length",
        }  # fmt: skip


@on_loop
async def test_a_request_id_is_repeated_only_where_it_is_harmless():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for given, is_kept in (
            ("abc-1_2.3:4", True),
            ("a" * 128, True),
            ("a" * 129, False),
            ("a b", False),
            ("\u00e9", False),
        ):
            answer = await client.ask(chat(), more=f"x-request-id: {given}\r\n")
            reported = answer.header("x-request-id") or ""
            assert (reported == given) is is_kept
            assert upstream.requests[-1].header("x-request-id") == reported
            assert is_kept or reported.startswith("req-")


@on_loop
async def test_who_closes_its_sending_half_is_still_answered():
    answered = asyncio.Event()

    async def after_a_while(peer: Peer, request: Received) -> None:
        await answered.wait()
        await peer.answer(b'{"late":true}')

    async with (
        ScriptedUpstream(after_a_while) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(chat())
        client.half_close()
        await rig.until(lambda: bool(upstream.requests))
        answered.set()
        assert (await client.answer()).json == {"late": True}
        assert await client.ended() == b""


@on_loop
async def test_an_answer_of_many_megabytes_passes_through():
    big = b"[" + b"1234567890," * 400_000 + b"0]"

    async def in_full(peer: Peer, request: Received) -> None:
        await peer.answer(big)

    async with (
        ScriptedUpstream(in_full) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask({"model": "m", "input": "x"}, "/v1/embeddings")
        assert answer.body == big
        assert (await client.ask({"model": "m", "input": "x"}, "/v1/embeddings")).body == big


@on_loop
async def test_an_answer_until_the_close_is_whole_and_its_connection_is_not_used_again():
    async def to_the_end(peer: Peer, request: Received) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + b'{"a":1}')
        peer.close()

    async with (
        ScriptedUpstream(to_the_end) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).json == {"a": 1}
        assert (await client.ask(chat())).json == {"a": 1}
        assert len(upstream.peers) == 2


@on_loop
async def test_the_decision_is_explained_to_who_asks():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        plain = await client.ask(chat())
        requested = await client.ask(chat(), more="x-octavo-explain: 1\r\n")
        assert plain.header("x-octavo-explain") is None
        reported = json.loads(requested.header("x-octavo-explain") or "")
        assert reported["endpoint"] == "e0"
        assert reported["candidates"][0]["endpoint"] == "e0"
