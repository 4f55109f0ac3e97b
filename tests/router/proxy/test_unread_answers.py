"""Who asks and asks without reading is answered no faster than it reads: nothing piles up here."""

from __future__ import annotations

import asyncio
import socket

import pytest

from octavo_router.http.messages import Handler, Inbound, Reply
from octavo_router.http.sockets import UNSENT_BYTES
from tests.fakes.http_client import RawClient, chat, post_bytes
from tests.fakes.router_rig import Rig, fast_config, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream

LARGE = b'{"text":"' + b"x" * 300_000 + b'"}'
NUM_ASKED = 60
CONFIG = fast_config(limits={"write_buffer_bytes": 65536})


def large(request: Inbound) -> Reply:
    return Reply(body=LARGE)


ROUTES: dict[tuple[str, str], Handler] = {("GET", "/large"): large}
# One of the router's own routes, whose answer is there at once, and one of an engine's.
ASKED = {"own": b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n", "proxied": post_bytes(chat())}


async def answer_large(peer: Peer, request: Received) -> None:
    await peer.answer(LARGE)


def unsent(rig: Rig) -> int:
    [connection] = rig.shared.connections
    size: int = connection._transport.get_write_buffer_size()
    return size


def is_paused(rig: Rig) -> bool:
    return any(one.is_paused for one in rig.shared.connections)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["stays", "says it has no more to ask"])
@pytest.mark.parametrize("what", ASKED)
@on_loop
async def test_answers_wait_for_their_reader_and_all_arrive_in_the_end(what: str, ends: str):
    async with (
        ScriptedUpstream(answer_large) as upstream,
        routing_to(upstream.port, config=CONFIG, routes=ROUTES) as rig,
    ):
        client = await RawClient.open(rig.port, receive_buffer=4096)
        await client.send(ASKED[what] * NUM_ASKED)
        if ends != "stays":
            client.half_close()
        await rig.until(lambda: is_paused(rig))
        for _ in range(50):  # turns in which more could come
            await asyncio.sleep(0)
        assert unsent(rig) < 2 * len(LARGE)
        assert len(upstream.requests) < NUM_ASKED / 2
        client.reader._limit = 2**24  # type: ignore[attr-defined]  # reads on
        for _ in range(NUM_ASKED):
            answer = await client.answer()
            assert (answer.status, len(answer.body)) == (200, len(LARGE))
        if ends == "stays":
            await client.send(ASKED[what])
            assert (await client.answer()).status == 200
        client.writer.close()
        await rig.until(lambda: not rig.shared.connections)
        await rig.settled()


@pytest.mark.parametrize("what", ASKED)
@on_loop
async def test_who_never_reads_is_ended_in_time(what: str):
    async with (
        ScriptedUpstream(answer_large) as upstream,
        routing_to(upstream.port, config=CONFIG, routes=ROUTES) as rig,
    ):
        client = await RawClient.open(rig.port, receive_buffer=4096)
        await client.send(ASKED[what] * NUM_ASKED)
        await rig.until(lambda: is_paused(rig))
        await rig.settled()
        rig.later(59.0)
        assert len(rig.shared.connections) == 1
        rig.later(61.0)
        await rig.until(lambda: not rig.shared.connections)
        await rig.settled()
        client.reader._limit = 2**24  # type: ignore[attr-defined]  # reads on
        with pytest.raises(ConnectionResetError):  # what was unsent is not kept for it
            await client.reader.read()
        client.writer.close()


@on_loop
async def test_the_kernel_takes_little_for_a_client_that_does_not_read():
    async with (
        ScriptedUpstream(answer_large) as upstream,
        routing_to(upstream.port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        assert (await client.ask(chat())).status == 200
        [connection] = rig.shared.connections
        sock = connection._transport.get_extra_info("socket")
        bound = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert bound == UNSENT_BYTES
