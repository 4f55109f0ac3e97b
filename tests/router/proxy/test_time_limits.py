"""A client says how long it will wait: queue and attempts are bounded by it, and engines know."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import BlackHole, Peer, Received, ScriptedUpstream

HEADER = "x-octavo-timeout-ms"


def limit(milliseconds: object) -> str:
    return f"{HEADER}: {milliseconds}\r\n"


async def never(peer: Peer, request: Received) -> None:
    await peer.left()


@on_loop
async def test_an_engine_is_told_what_is_left_and_nothing_where_the_client_set_no_limit():
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.ask(chat(), more=limit(50_000))
        await client.ask(chat(), more="x-octavo-other: 1\r\n")
        limited, plain = upstream.requests
        assert 30_000 < int(limited.header(HEADER) or 0) <= 50_000
        assert plain.header(HEADER) is None
        assert not [name for name, _ in plain.headers if name.startswith("x-octavo-")]


@on_loop
async def test_an_engine_that_is_slower_is_given_up_and_cancelled():
    async with (
        ScriptedUpstream(never) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        began = time.monotonic()
        answer = await client.ask(chat(), more=limit(150))
        assert (answer.status, answer.code) == (504, "deadline_exceeded")
        assert 0.14 < time.monotonic() - began < 15.0  # not the 60 that an engine may take
        await upstream.peers[0].has_left.wait()
        await rig.settled()


@on_loop
async def test_what_an_attempt_took_is_not_left_for_the_next():
    async def refuses(peer: Peer, request: Received) -> None:
        await asyncio.sleep(0.21)  # timers may be early by a millisecond
        await peer.answer(b"{}", status="503 Busy")

    async with (
        ScriptedUpstream(refuses) as first,
        ScriptedUpstream() as second,
        routing_to(first.port, second.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat(), more=limit(30_000))).status == 200
        left = [int(one.requests[0].header(HEADER) or 0) for one in (first, second)]
        assert left[0] - left[1] >= 200


@on_loop
async def test_time_in_the_queue_counts():
    config = fast_config(flow={"max_in_flight": 1, "in_flight_factor": 1.0})
    async with (
        ScriptedUpstream(never) as upstream,
        routing_to(upstream.port, config=config) as rig,
        await RawClient.open(rig.port) as busy,
        await RawClient.open(rig.port) as client,
    ):
        await busy.post(chat())
        await rig.until(lambda: len(upstream.requests) == 1)
        asking = asyncio.create_task(client.ask(chat(), more=limit(100)))
        while not asking.done():
            await asyncio.sleep(0.02)
            rig.gate.tick()
        answer = asking.result()
        assert (answer.status, answer.code) == (504, "deadline_exceeded")
        assert len(upstream.requests) == 1


@on_loop
async def test_time_to_connect_counts():
    with BlackHole() as hole:
        config = fast_config(timeouts={"connect_s": 10.0})
        async with (
            routing_to(hole.port, config=config) as rig,
            await RawClient.open(rig.port) as client,
        ):
            answer = await client.ask(chat(), more=limit(100))
            assert (answer.status, answer.code) == (504, "deadline_exceeded")
            await rig.settled()


@pytest.mark.slow
@on_loop
async def test_no_client_waits_longer_than_the_router_lets_anybody():
    config = fast_config(timeouts={"total_s": 1.0})
    async with (
        ScriptedUpstream(never) as upstream,
        routing_to(upstream.port, config=config) as rig,
        await RawClient.open(rig.port) as client,
    ):
        answer = await client.ask(chat(), more=limit(10**9))
        assert answer.code == "deadline_exceeded"
        assert int(upstream.requests[0].header(HEADER) or 0) <= 1000


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "1e3", "9" * 13])
def test_a_limit_that_is_none_is_refused_before_anything_is_sent(value):
    @on_loop
    async def ask() -> None:
        async with (
            ScriptedUpstream() as upstream,
            routing_to(upstream.port) as rig,
            await RawClient.open(rig.port) as client,
        ):
            answer = await client.ask(chat(), more=limit(value))
            assert (answer.status, answer.code) == (400, "invalid_header")
            assert answer.json["error"]["param"] == HEADER
            assert not upstream.requests

    ask()
