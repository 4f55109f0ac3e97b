"""Copies of requests for another pool: they reach it, and nobody notices what becomes of them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.settings import BackendConfig, MirrorConfig, ServedModelConfig
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.proxy.mirror import MAX_COPIES
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import Rig, fast_config, on_loop, routing_to
from tests.fakes.upstream import CHAT, Peer, Received, ScriptedUpstream, closed_port, fixed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MODEL = ServedModelConfig(
    name="m",
    backends=(BackendConfig(pool="default"),),
    mirrors=(MirrorConfig(pool="next", percent=100.0),),
)


def add_mirror(rig: Rig, port: int) -> None:
    rig.registry.replace(
        "mirror", [EndpointSpec(id="copy", address=Address("127.0.0.1", port), pool="next")]
    )
    rig.registry.report(rig.registry.endpoints["copy"], "ready")
    rig.proxy._models.replace((MODEL,))


async def over(rig: Rig) -> None:
    await rig.until(lambda: not rig.proxy.mirrors.under_way)
    await rig.settled()


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_the_copy_is_the_request_and_its_answer_goes_nowhere(stream: bool):
    async def other(peer: Peer, request: Received) -> None:
        await fixed(peer, request)

    async with (
        ScriptedUpstream() as live,
        ScriptedUpstream(other) as copy,
        routing_to(live.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        add_mirror(rig, copy.port)
        body = chat(stream=stream)
        answer = await client.ask(body)
        assert answer.status == 200
        assert stream or answer.json == CHAT
        await over(rig)
        assert [one.json for one in copy.requests] == [one.json for one in live.requests] == [body]
        assert copy.requests[0].header("x-request-id") == live.requests[0].header("x-request-id")
        assert len(rig.records) == 1  # the client asked once


@pytest.mark.parametrize("how", ["refuses", "dies", "is closed"])
@on_loop
async def test_a_mirror_that_fails_costs_the_client_nothing(how: str):
    async def failing(peer: Peer, request: Received) -> None:
        if how == "refuses":
            await peer.answer(b"{}", status="503 Service Unavailable")
        else:
            peer.reset()

    async with (
        ScriptedUpstream() as live,
        ScriptedUpstream(failing) as copy,
        routing_to(live.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        add_mirror(rig, closed_port() if how == "is closed" else copy.port)
        for _ in range(5):
            assert (await client.ask(chat())).json == CHAT
        await over(rig)
        assert len(live.requests) == 5
        assert {record.attempts for record in rig.records} == {1}  # a copy is never tried again


@on_loop
async def test_a_copy_that_its_engine_dies_of_is_not_sent_again():
    async def dies(peer: Peer, request: Received) -> None:
        peer.reset()

    async with (
        ScriptedUpstream() as live,
        ScriptedUpstream(dies) as copy,
        routing_to(live.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        add_mirror(rig, copy.port)
        for _ in range(5):
            assert (await client.ask(chat())).json == CHAT
            await over(rig)
        assert len(copy.requests) == 1
        await client.ask(chat("something else"))
        await over(rig)
        assert len(copy.requests) == 2


async def silent(peer: Peer, request: Received) -> None:
    await peer.left()


@asynccontextmanager
async def silent_mirror(
    **settings: Any,
) -> AsyncIterator[tuple[ScriptedUpstream, Rig, RawClient]]:
    """A mirror that never answers, a router, and a client."""
    async with (
        ScriptedUpstream() as live,
        ScriptedUpstream(silent) as copy,
        routing_to(live.port, config=fast_config(**settings)) as rig,
        await RawClient.open(rig.port) as client,
    ):
        add_mirror(rig, copy.port)
        yield copy, rig, client


@on_loop
async def test_copies_are_bounded_and_never_waited_for():
    async with silent_mirror(timeouts={"connect_s": 5.0}) as (copy, rig, client):
        for _ in range(MAX_COPIES + 20):
            assert (await client.ask(chat())).status == 200
        assert len(rig.proxy.mirrors.under_way) == MAX_COPIES
        rig.proxy.mirrors.stop()
        await over(rig)
        await rig.until(lambda: copy.num_open == 0)
        await asyncio.sleep(0)


@pytest.mark.slow
@on_loop
async def test_a_copy_that_is_never_answered_is_given_up_in_time():
    async with silent_mirror(timeouts={"total_s": 1.0}) as (copy, rig, client):
        await client.post(chat())
        await rig.until(lambda: bool(copy.requests))
        assert rig.registry.endpoints["copy"].in_flight == 1
        await rig.until(lambda: copy.peers[0].has_left.is_set())
        assert rig.registry.endpoints["copy"].in_flight == 0
        await over(rig)
