"""A client that goes away, in whatever phase, takes its work along: at once, and all of it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import BlackHole, Peer, Received, ScriptedUpstream, event, fixed

AT_ONCE_S = 0.1


async def silent(peer: Peer, request: Received) -> None:
    await peer.left()


async def one_word(peer: Peer, request: Received) -> None:
    await peer.begin_stream()
    await peer.chunk(event("hel"))
    await peer.left()


async def half_a_body(peer: Peer, request: Received) -> None:
    await peer.send(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
    )
    await peer.left()


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize(
    ("script", "stream"),
    [(silent, False), (silent, True), (half_a_body, False), (one_word, True)],
    ids=["before the answer", "before the stream", "within the answer", "within the stream"],
)
@on_loop
async def test_the_engine_is_told_at_once(script, stream, leave):
    async with ScriptedUpstream(script) as upstream, routing_to(upstream.port) as rig:

        async def leave_it(number: int) -> float:
            """How long it takes until the engine knows."""
            client = await RawClient.open(rig.port)
            await client.post(chat(stream=stream))
            await rig.until(lambda: len(upstream.requests) == number)
            if script is one_word:
                await client.head()
                await client.chunk()
            left_at = time.monotonic()
            if leave == "reset":
                client.reset()
            else:
                client.writer.close()
            await upstream.peers[-1].has_left.wait()
            return time.monotonic() - left_at

        number = 1
        while await leave_it(number) > AT_ONCE_S:  # the machine may be busy, but not each time
            number += 1
            assert number <= 20
        await rig.settled()
        assert {record.outcome for record in rig.records} == {"client_gone"}


@on_loop
async def test_a_client_that_waits_in_line_leaves_the_line():
    config = fast_config(flow={"max_in_flight": 1})
    async with (
        ScriptedUpstream(silent) as upstream,
        routing_to(upstream.port, config=config) as rig,
    ):
        first, second = await RawClient.open(rig.port), await RawClient.open(rig.port)
        await first.post(chat())
        await rig.until(lambda: bool(upstream.requests))
        await second.post(chat())
        await rig.until(lambda: rig.gate.demand("default").queued == 1)

        second.writer.close()
        await rig.until(lambda: rig.gate.demand("default").queued == 0)
        assert [record.outcome for record in rig.records] == ["client_gone"]

        first.writer.close()
        await rig.settled()
        assert len(upstream.requests) == 1


@on_loop
async def test_a_client_that_is_held_leaves_too():
    async with ScriptedUpstream() as upstream, routing_to(upstream.port) as rig:
        rig.registry.report(rig.endpoints[0], "down")
        client = await RawClient.open(rig.port)
        await client.post(chat())
        await rig.until(lambda: rig.gate.demand("default").held == 1)
        client.writer.close()
        await rig.until(lambda: rig.gate.demand("default").held == 0)
        await rig.settled()
        assert upstream.requests == []


@on_loop
async def test_a_client_that_leaves_while_the_router_connects_sends_nothing():
    with BlackHole() as hole:
        config = fast_config(timeouts={"connect_s": 5.0})
        async with routing_to(hole.port, config=config) as rig:
            client = await RawClient.open(rig.port)
            await client.post(chat())
            pool = rig.upstreams.of(rig.endpoints[0]).pool
            await rig.until(lambda: pool.num_connecting == 1)
            client.reset()
            await rig.until(lambda: pool.num_connecting == 0)
            await rig.settled()


@on_loop
async def test_a_client_that_leaves_within_its_body_was_never_there():
    async with ScriptedUpstream() as upstream, routing_to(upstream.port) as rig:
        client = await RawClient.open(rig.port)
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 100\r\n\r\n{"model"'
        )
        await rig.until(lambda: len(rig.shared.connections) == 1)
        client.writer.close()
        await rig.until(lambda: not rig.shared.connections)
        assert upstream.requests == []
        await rig.settled()


@pytest.mark.slow
@on_loop
async def test_a_thousand_cancels_leave_nothing_behind():
    async with ScriptedUpstream(one_word) as upstream, routing_to(upstream.port) as rig:

        async def come_and_go() -> None:
            client = await RawClient.open(rig.port)
            await client.post(chat(stream=True))
            await client.head()
            client.reset()

        for _ in range(20):
            await asyncio.gather(*(come_and_go() for _ in range(50)))
        await rig.settled()
        await rig.until(lambda: upstream.num_open == 0)
        assert len(rig.records) == 1000
        assert {record.outcome for record in rig.records} == {"client_gone"}
        await rig.until(lambda: not rig.shared.connections)
        assert len(rig.deadlines) == 1  # the pool's own


@on_loop
async def test_a_slow_reader_pauses_the_engine_and_is_ended():
    sent = 0

    async def pour(peer: Peer, request: Received) -> None:
        nonlocal sent
        await peer.begin_stream()
        while True:
            data = event("x" * 4000)
            await peer.chunk(data)
            sent += len(data)

    async with ScriptedUpstream(pour) as upstream, routing_to(upstream.port) as rig:
        client = await RawClient.open(rig.port, receive_buffer=4096)
        await client.post(chat(stream=True))
        await rig.until(lambda: any(c.is_paused for c in rig.shared.connections))
        [connection] = rig.shared.connections
        assert connection._transport.get_write_buffer_size() <= 256 * 1024
        rig.later(60.0)
        await upstream.peers[0].has_left.wait()
        await rig.settled()
        assert rig.records[0].code == "client_too_slow"
        client.writer.close()


@on_loop
async def test_clients_that_do_not_read_take_no_seats_from_others():
    gone = asyncio.Event()

    async def pour(peer: Peer, request: Received) -> None:
        if b"slow" not in request.body:
            await fixed(peer, request)
            return
        await peer.begin_stream()
        while not gone.is_set():
            await peer.chunk(event("x" * 4000))

    config = fast_config(flow={"max_in_flight": 2})
    async with ScriptedUpstream(pour) as upstream, routing_to(upstream.port, config=config) as rig:
        slow = [await RawClient.open(rig.port, receive_buffer=4096) for _ in range(6)]
        for client in slow:
            await client.post(chat("slow", stream=True))
        # Two at a time take the seats; each gives its seat up once it does not read.
        await rig.until(lambda: sum(c.is_paused for c in rig.shared.connections) == 6)
        [endpoint] = rig.registry.endpoints.values()
        assert (endpoint.in_flight, endpoint.num_paused, endpoint.num_requests) == (0, 6, 6)
        other = await RawClient.open(rig.port)
        await other.post(chat())
        assert (await other.answer()).status == 200
        for client in [*slow, other]:
            client.writer.close()
        gone.set()
        await rig.settled()
        assert endpoint.num_requests == 0


@on_loop
async def test_a_reader_that_catches_up_gets_everything():
    async def pour(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        for i in range(1000):
            await peer.chunk(event(f"{i} " + "x" * 4000))
        await peer.chunk(b"data: [DONE]\n\n")
        await peer.end_stream()

    async with ScriptedUpstream(pour) as upstream, routing_to(upstream.port) as rig:
        client = await RawClient.open(rig.port, receive_buffer=4096)
        await client.post(chat(stream=True))
        await rig.until(lambda: any(c.is_paused for c in rig.shared.connections))
        client.reader._limit = 2**20  # type: ignore[attr-defined]  # reads on
        answer = await client.answer()
        assert answer.body.count(b"data: {") == 1000
        assert answer.body.endswith(b"data: [DONE]\n\n")
        client.writer.close()
        await rig.settled()


@on_loop
async def test_room_that_comes_is_given_to_who_waits():
    config = fast_config(flow={"max_in_flight": 1})
    go_on = asyncio.Event()

    async def when_told(peer: Peer, request: Received) -> None:
        await go_on.wait()
        await fixed(peer, request)

    async with (
        ScriptedUpstream(when_told) as upstream,
        routing_to(upstream.port, config=config) as rig,
    ):
        clients = [await RawClient.open(rig.port) for _ in range(5)]
        for client in clients:
            await client.post(chat())
        await rig.until(lambda: rig.gate.demand("default").queued == 4)
        go_on.set()
        for client in clients:
            assert (await client.answer()).status == 200
            client.writer.close()
        await rig.settled()
        assert sorted(record.queue_s > 0 for record in rig.records) == [False] + [True] * 4


@on_loop
async def test_a_stream_that_is_held_hears_how_it_stands_and_then_its_answer(monkeypatch):
    monkeypatch.setattr("octavo_router.proxy.exchange._PROGRESS_S", 0.05)
    async with ScriptedUpstream() as upstream, routing_to(upstream.port) as rig:
        rig.registry.report(rig.endpoints[0], "down")
        async with await RawClient.open(rig.port) as client:
            await client.post(chat(stream=True))
            head = await client.head()
            assert (head.status, head.header("content-type")) == (
                200,
                "text/event-stream; charset=utf-8",
            )
            assert (await client.chunk()).startswith(b": waiting for default: 0 of 1 engines ready")
            rig.registry.report(rig.endpoints[0], "ready")
            body = b""
            while piece := await client.chunk():
                if not piece.startswith(b": waiting"):
                    body += piece
            assert body == event("hel") + event("lo") + b"data: [DONE]\n\n"
        await rig.settled()
        assert rig.records[0].outcome == "ok"


@on_loop
async def test_who_is_held_too_long_is_told_when_to_come_back():
    config = fast_config(flow={"hold_timeout_s": 0.1})
    async with routing_to(1, config=config) as rig:
        rig.registry.report(rig.endpoints[0], "down")
        async with await RawClient.open(rig.port) as client:
            await client.post(chat())
            await rig.until(lambda: rig.gate.demand("default").held == 1)
            while rig.gate.demand("default").held:
                rig.gate.tick()
                await asyncio.sleep(0.01)
            answer = await client.answer()
            assert (answer.status, answer.code) == (503, "no_endpoints")
            assert answer.header("retry-after") is not None
        await rig.settled()
