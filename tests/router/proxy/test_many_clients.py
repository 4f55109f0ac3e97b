"""Many at once: clients that come and leave, wait, or do not read; afterwards all is as before."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from contextlib import AsyncExitStack
from functools import partial

import pytest

from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.residency import native
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import fast_config, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, event

KEYS = b"".join(number.to_bytes(8, "little") for number in range(1, 65))


async def silent(peer: Peer, request: Received) -> None:
    await peer.left()


def has_seen(upstream: ScriptedUpstream, count: int) -> bool:
    return len(upstream.requests) == count


@on_loop
async def test_after_five_hundred_cancelled_requests_nothing_is_left():
    async with ScriptedUpstream(silent) as upstream, routing_to(upstream.port) as rig:
        tasks = len(asyncio.all_tasks())
        for number in range(1, 11):
            async with AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(await RawClient.open(rig.port))
                    for _ in range(50)
                ]
                for client in clients:
                    await client.post(chat(stream=True))
                await rig.until(partial(has_seen, upstream, 50 * number))
                for client in clients:
                    client.reset()
                await rig.settled()
        assert len(upstream.requests) == 500
        await rig.until(lambda: upstream.num_open == 0)
        await rig.until(lambda: not rig.shared.connections)
        assert rig.upstreams.num_connections == 0
        await rig.until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert rig.gate.demand("default").queued == 0


@pytest.mark.slow
@on_loop
async def test_idle_connections_cost_little_and_nobody_waits_for_them():
    number = 300
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        AsyncExitStack() as stack,
    ):
        first = await stack.enter_async_context(await RawClient.open(rig.port))
        await first.ask(chat())
        tracemalloc.start(4)
        try:
            for _ in range(number):
                client = await stack.enter_async_context(await RawClient.open(rig.port))
                await client.get("/nothing")
            taken = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/octavo_router/*", all_frames=True)]
            )
        finally:
            tracemalloc.stop()
        assert len(rig.shared.connections) == number + 1
        assert sum(one.size for one in taken.statistics("filename")) < 32 * 1024 * number
        used_s = time.process_time()  # by the wall it would be the machine's affair
        assert (await first.ask(chat())).status == 200
        assert time.process_time() - used_s <= 0.1


@on_loop
async def test_readers_that_do_not_read_are_ended_and_keep_little():
    number, piece = 20, event("x" * 8000)

    async def endless(peer: Peer, request: Received) -> None:
        await peer.begin_stream()
        while True:
            await peer.chunk(piece)

    config = fast_config(flow={"max_in_flight": 1000})
    async with (
        ScriptedUpstream(endless) as upstream,
        routing_to(upstream.port, config=config) as rig,
        AsyncExitStack() as stack,
    ):
        for _ in range(number):
            client = await stack.enter_async_context(
                await RawClient.open(rig.port, receive_buffer=4096)
            )
            await client.post(chat(stream=True))
        await rig.until(lambda: sum(one.is_paused for one in rig.shared.connections) == number)
        unsent = [one._transport.get_write_buffer_size() for one in rig.shared.connections]
        assert max(unsent) <= 512 * 1024
        rig.later(60.0)
        await rig.settled()  # all are reaped
        assert [record.code for record in rig.records] == ["client_too_slow"] * number
        await rig.until(lambda: upstream.num_open == 0)


@on_loop
async def test_a_clock_that_jumps_ends_nothing_early_and_lets_nothing_stay(monkeypatch):
    jumps = [0.0]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jumps[0])
    async with (
        ScriptedUpstream() as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for jump in (300.0, -300.0, 86400.0):
            jumps[0] = jump
            assert (await client.ask(chat(stream=True))).status == 200
        await rig.settled()
        assert len(upstream.peers) == 1  # kept over all of it
        assert all(0.0 <= record.duration_s < 5.0 for record in rig.records)


def test_ten_thousand_replaced_pods_leave_nothing_in_the_index():
    index = native.load().ResidencyIndex()
    registry = Registry(index)
    sizes = []
    for generation in range(1000):
        specs = [
            EndpointSpec(
                id=f"{generation}-{number}",
                address=Address("10.0.0.1", 8000 + number),
                names=("m",),
            )
            for number in range(10)
        ]
        registry.replace("test", specs)
        for spec in specs:
            endpoint = registry.endpoints[spec.id]
            registry.report(endpoint, "ready")
            index.assume(endpoint.slot, KEYS, 16.0)
        assert len(registry.candidates("default").endpoints) == 10
        sizes.append(index.memory_bytes)
    assert max(endpoint.slot for endpoint in registry.endpoints.values()) < 20
    assert sizes[-1] <= 2 * sizes[1]
    registry.replace("test", [])
    assert not registry.endpoints
