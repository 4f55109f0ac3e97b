"""Whatever an engine does, the client gets the right error, nothing stays behind, and the next
request is fine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import (
    CHAT,
    BlackHole,
    Peer,
    Received,
    ScriptedUpstream,
    closed_port,
    event,
    fixed,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from octavo_router.endpoints.endpoint import Endpoint, Kind
    from octavo_router.http.upstream_pool import UpstreamPool
    from octavo_router.proxy.upstreams import Upstream
    from tests.fakes.router_rig import Rig

    Script = Callable[[Peer, Received], Awaitable[None]]


def is_empty(pool: UpstreamPool) -> bool:
    return pool.num_idle == 0


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


@asynccontextmanager
async def once(script: Script) -> AsyncIterator[tuple[Rig, RawClient, ScriptedUpstream]]:
    """An engine that does this once, and then behaves."""
    calls = 0

    async def first_then_fixed(peer: Peer, request: Received) -> None:
        nonlocal calls
        calls += 1
        await (script if calls == 1 else fixed)(peer, request)

    async with (
        ScriptedUpstream(first_then_fixed) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        yield rig, client, upstream


async def assert_next_is_fine(rig: Rig) -> None:
    async with await RawClient.open(rig.port) as client:
        answer = await client.ask(chat())
        assert (answer.status, answer.json) == (200, CHAT)
    await rig.settled()


def sending(*pieces: bytes, end: str = "close") -> Script:
    async def script(peer: Peer, request: Received) -> None:
        for piece in pieces:
            await peer.send(piece)
            await asyncio.sleep(0)
        if end == "close":
            peer.close()
        elif end == "reset":
            peer.reset()
        elif end == "stall":
            await peer.left()

    return script


CUT = {
    "no answer": sending(),
    "no answer, reset": sending(end="reset"),
    "half a head": sending(HEAD[:20]),
    "half a head, reset": sending(HEAD[:20], end="reset"),
    "half a length": sending(HEAD + b'content-length: 100\r\n\r\n{"a":'),
    "half a length, reset": sending(HEAD + b'content-length: 100\r\n\r\n{"a":', end="reset"),
    "no last chunk": sending(HEAD + b'transfer-encoding: chunked\r\n\r\n5\r\n{"a":\r\n'),
    "half a chunk": sending(HEAD + b'transfer-encoding: chunked\r\n\r\n50\r\n{"a":'),
    "half a size": sending(HEAD + b"transfer-encoding: chunked\r\n\r\n5"),
}


@pytest.mark.parametrize("script", CUT.values(), ids=list(CUT))
@on_loop
async def test_an_answer_that_is_cut_is_lost_and_not_asked_for_again(script: Script):
    async with once(script) as (rig, client, upstream):
        answer = await client.ask(chat())
        assert (answer.status, answer.code) == (502, "upstream_lost")
        assert len(upstream.requests) == 1  # it may have run
        await assert_next_is_fine(rig)
        assert rig.records[0].outcome == "lost"


BAD = {
    "garbage": sending(b"\x00\x01\x02garbage\r\n\r\n"),
    "another protocol": sending(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "two lengths": sending(HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"),
    "both lengths": sending(HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}"),
    "length of words": sending(HEAD + b"content-length: two\r\n\r\n{}"),
    "another coding": sending(HEAD + b"transfer-encoding: gzip\r\n\r\n{}"),
    "field without a colon": sending(HEAD + b"nonsense\r\n\r\n{}"),
    "bare line feeds": sending(b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}"),
    "nothing": sending(HEAD + b"content-length: 0\r\n\r\n", end="keep"),
    "nothing in chunks": sending(
        STREAM_HEAD.replace(b"text/event-stream", b"application/json") + b"0\r\n\r\n", end="keep"
    ),
    "a stream without events": sending(STREAM_HEAD + b"0\r\n\r\n", end="keep"),
    "a web page": sending(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>", end="keep"
    ),
    "interim answers without end": sending(b"HTTP/1.1 102 Processing\r\n\r\n" * 50),
    "switched protocols": sending(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"),
    "a head of 100 KiB": sending(HEAD, *[b"x-filler: " + b"x" * 1000 + b"\r\n"] * 100),
    "one line of 100 KiB": sending(HEAD + b"x-filler: " + b"x" * 100_000),
}


@pytest.mark.parametrize("script", BAD.values(), ids=list(BAD))
@on_loop
async def test_an_answer_that_makes_no_sense_is_not_passed_on(script: Script):
    async with once(script) as (rig, client, _):
        answer = await client.ask(chat())
        assert (answer.status, answer.code) == (502, "upstream_bad_answer")
        await assert_next_is_fine(rig)


@on_loop
async def test_what_comes_behind_an_answer_is_dropped_with_its_connection():
    async with once(sending(HEAD + b"content-length: 2\r\n\r\n{}HTTP/1.1 200 OK", end="keep")) as (
        rig,
        client,
        upstream,
    ):
        assert (await client.ask(chat())).body == b"{}"
        await assert_next_is_fine(rig)
        assert len(upstream.peers) == 2


@on_loop
async def test_some_interim_answers_are_passed_over():
    async with once(
        sending(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n",
            HEAD + b"content-length: 2\r\n\r\n{}",
            end="keep",
        )
    ) as (rig, client, _):
        assert (await client.ask(chat())).body == b"{}"
        await assert_next_is_fine(rig)


@on_loop
async def test_chunk_extensions_and_trailers_of_an_engine_end_here():
    answer = (
        HEAD + b'transfer-encoding: chunked\r\n\r\n2;ext="x"\r\n{}\r\n0\r\nx-trailer: 1\r\n\r\n'
    )
    async with once(sending(answer, end="keep")) as (rig, client, upstream):
        got = await client.ask(chat())
        assert got.body == b"{}"
        assert got.header("x-trailer") is None
        await assert_next_is_fine(rig)
        assert len(upstream.peers) == 1


@pytest.mark.parametrize("end", ["close", "reset"])
@on_loop
async def test_a_stream_that_breaks_ends_with_whole_events_an_error_and_done(end: str):
    word = event("hel")
    cut = event("lo")[:17]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in (word, cut))
    async with once(sending(STREAM_HEAD, chunks, end=end)) as (rig, client, _):
        answer = await client.ask(chat(stream=True))
        events = answer.body.split(b"\n\n")
        assert events[0] + b"\n\n" == word
        error = json.loads(events[1].removeprefix(b"data: "))["error"]
        assert error["code"] == "upstream_lost"
        assert events[2:] == [b"data: [DONE]", b""]
        await assert_next_is_fine(rig)


@on_loop
async def test_a_stream_that_stalls_ends_in_time():
    chunk = b"%x\r\n%b\r\n" % (len(event("hel")), event("hel"))
    async with once(sending(STREAM_HEAD, chunk, end="stall")) as (rig, client, upstream):
        await client.post(chat(stream=True))
        assert (await client.head()).status == 200
        assert await client.chunk() == event("hel")
        rig.later(25.0)
        assert rig.proxy.exchanges
        rig.later(30.0)
        ending = await client.chunk()
        assert b'"code": "upstream_stalled"' in ending
        assert ending.endswith(b"data: [DONE]\n\n")
        await upstream.peers[0].has_left.wait()
        await assert_next_is_fine(rig)


@on_loop
async def test_an_answer_that_is_no_stream_may_take_as_long_as_a_request_may():
    """Its first byte comes with its last: no deadline of first tokens applies."""
    done = asyncio.Event()

    async def long(peer: Peer, request: Received) -> None:
        await done.wait()
        await fixed(peer, request)

    async with once(long) as (rig, client, upstream):
        await client.post(chat())
        await rig.until(lambda: bool(upstream.requests))
        rig.later(590.0)
        done.set()
        answer = await client.answer()
        assert (answer.status, answer.json) == (200, CHAT)
        assert len(upstream.requests) == 1
        await rig.settled()


@pytest.mark.parametrize("kind", ["openai", "octavo"])
@on_loop
async def test_an_answer_that_is_no_stream_and_takes_too_long_is_computed_once(kind: Kind):
    async with (
        ScriptedUpstream(sending(end="stall")) as first,
        ScriptedUpstream() as second,
        routing_to(first.port, second.port, kind=kind) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.post(chat())
        await rig.until(lambda: bool(first.requests))
        rig.later(601.0)
        answer = await client.answer()
        assert (answer.status, answer.code) == (504, "deadline_exceeded")
        assert not second.requests
        await rig.settled()


@on_loop
async def test_an_engine_that_begins_no_stream_is_given_up_in_time():
    async with once(sending(end="stall")) as (rig, client, upstream):
        await client.post(chat(stream=True))
        await rig.until(lambda: bool(upstream.requests))
        rig.later(55.0)
        assert rig.proxy.exchanges
        await rig.given_up(rig.endpoints[0], after_s=60.1)  # and a bit for its prompt
        answer = await client.answer()
        assert (answer.status, answer.code) == (504, "upstream_timeout")
        await upstream.peers[0].has_left.wait()
        assert len(upstream.requests) == 1  # never sent twice
        await assert_next_is_fine(rig)


@on_loop
async def test_an_event_of_many_megabytes_is_not_kept():
    async def endless(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        await peer.chunk(b"data: ")
        for _ in range(64):
            await peer.chunk(b"x" * 65536)

    async with once(endless) as (rig, client, _):
        answer = await client.ask(chat(stream=True))
        assert (answer.status, answer.code) == (502, "upstream_bad_answer")
        await assert_next_is_fine(rig)


@on_loop
async def test_who_refuses_the_connection_is_passed_over():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(closed_port(), upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).status == 200
        assert rig.records[0].attempts == 2
        await rig.settled()


@pytest.mark.slow
@on_loop
async def test_who_does_not_accept_connections_is_passed_over_in_time():
    config = fast_config(timeouts={"connect_s": 0.5})
    with BlackHole() as hole:
        async with (
            ScriptedUpstream() as upstream,
            routing_to(hole.port, upstream.port, config=config) as rig,
            await RawClient.open(rig.port) as client,
        ):
            began_at = time.monotonic()
            assert (await client.ask(chat())).status == 200
            assert 0.5 <= time.monotonic() - began_at < 10.0  # the kernel tries for minutes
            await rig.settled()


@on_loop
async def test_when_nobody_can_be_reached_the_client_is_told_when_to_come_back():
    async with (
        routing_to(closed_port(), closed_port()) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat())
        assert (answer.status, answer.code) == (503, "upstream_unreachable")
        assert answer.header("retry-after") == "5"
        assert answer.header("x-error-code") == "upstream_unreachable"
        assert rig.records[0].attempts == 3
        await rig.settled()


@pytest.mark.parametrize("status", ["503 Service Unavailable", "429 Too Many Requests"])
@on_loop
async def test_who_does_not_accept_is_asked_elsewhere_once(status: str):
    async def full(peer: Peer, request: Received) -> None:
        await peer.answer(
            b'{"error":{"code":"queue_full"}}', status=status, more="retry-after: 7\r\n"
        )

    async with (
        ScriptedUpstream(full) as first,
        ScriptedUpstream(full) as second,
        ScriptedUpstream() as third,
        routing_to(first.port, second.port, third.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat())
        assert answer.status == int(status[:3])
        assert answer.header("retry-after") == "7"
        assert answer.json == {"error": {"code": "queue_full"}}  # the engine's own words
        assert [len(up.requests) for up in (first, second, third)] == [1, 1, 0]
        await rig.settled()


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 No", "500 Oops"])
@on_loop
async def test_an_error_of_the_request_itself_is_passed_on(status: str):
    async def refuse(peer: Peer, request: Received) -> None:
        await peer.answer(b'{"error":{"message":"no"}}', status=status)

    async with (
        ScriptedUpstream(refuse) as first,
        ScriptedUpstream() as second,
        routing_to(first.port, second.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat())
        assert answer.status == int(status[:3])
        assert answer.json == {"error": {"message": "no"}}
        assert second.requests == []
        assert (await client.ask(chat())).status == answer.status  # the connection was kept
        await rig.settled()


@on_loop
async def test_retries_stay_within_their_budget_when_everybody_fails():
    async with routing_to(closed_port(), closed_port()) as rig:

        async def ask() -> int:
            async with await RawClient.open(rig.port) as client:
                return (await client.ask(chat())).status

        statuses = await asyncio.gather(*(ask() for _ in range(100)))
        assert set(statuses) == {503}
        attempts = sum(record.attempts for record in rig.records)
        assert 100 < attempts <= 120, attempts
        await rig.settled()


@on_loop
async def test_a_kept_connection_that_the_engine_closed_is_not_used():
    async def answer_and_close(peer: Peer, request: Received) -> None:
        await fixed(peer, request)
        peer.close()

    async with (
        ScriptedUpstream(answer_and_close) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for i in range(5):
            assert (await client.ask(chat())).status == 200
            pool = rig.upstreams.of(rig.endpoints[0]).pool
            await rig.until(partial(is_empty, pool))
            assert len(upstream.peers) == i + 1


@on_loop
async def test_a_kept_connection_that_ends_at_the_very_moment_is_not_used():
    """Its end and the next request are there at once: whoever looks sees the end first."""
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).status == 200
        with at_hand(upstream.peers[-1].writer) as engine, at_hand(client.writer) as asking:
            engine.shutdown(socket.SHUT_WR)
            asking.send(post_bytes(chat()))
        answer = await client.answer()
        assert (answer.status, answer.json) == (200, CHAT)
        assert len(upstream.requests) == 2
        assert [record.attempts for record in rig.records] == [1, 1]
        await rig.settled()


def at_hand(writer: asyncio.StreamWriter) -> socket.socket:
    """The same connection, without the loop between."""
    return socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))


@on_loop
async def test_an_engine_that_is_taken_out_and_then_dies_leaves_no_way_behind():
    async def dies(peer: Peer, request: Received) -> None:
        rig.registry.replace("test", [])
        peer.reset()

    async with (
        ScriptedUpstream(dies) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).status == 502
        await rig.settled()
        assert len(rig.upstreams) == 0
        assert len(rig.deadlines) == 1  # the client's


@on_loop
async def test_a_way_that_cannot_be_made_costs_one_request_and_holds_no_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(endpoint: Endpoint) -> Upstream:
        raise OSError("a mistake of ours, as far as anybody can tell")

    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        rig.upstreams.of(rig.endpoints[0]).pool._close_idle()
        with monkeypatch.context() as patch:
            patch.setattr(rig.upstreams, "of", broken)
            await client.post(chat())
            assert await client.ended() == b""
        await rig.settled()
        assert [one.message for one in caplog.records] == ["Unhandled error in request"]
        await assert_next_is_fine(rig)
