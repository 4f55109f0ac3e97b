"""Clients that all come back at once over TLS: they wait their turn, and streams go on."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from octavo_router.config.load import load_config
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, event
from tests.router.test_server import plain_server, running, until_ready

if TYPE_CHECKING:
    from pathlib import Path

    from octavo_router.config.settings import RouterConfig


def configured(folder: Path, port: int, rate: float, header_s: float = 10.0) -> RouterConfig:
    text = f"""
server: {{tls_cert: {folder}/server.pem, tls_key: {folder}/server.key}}
limits: {{max_tls_handshakes_per_s: {rate}}}
timeouts: {{header_s: {header_s}}}
"""
    flags = {"access-log": "none", "upstreams": f"http://127.0.0.1:{port}"}
    return load_config(text=text, flags=flags)


async def come(port: int, context: ssl.SSLContext) -> RawClient:
    return RawClient(
        *await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    )


@pytest.mark.slow
@on_loop
async def test_they_are_taken_at_the_rate_and_a_stream_goes_on_meanwhile(certificates: Path):
    """Bounded below only: a machine that is slow makes it slower."""
    number, rate = 60, 50.0
    over = asyncio.Event()

    async def ticking(peer: Peer, request: Received) -> None:
        if b"/v1/chat" not in request.line or not request.json.get("stream"):
            return await plain_server(peer, request)
        await peer.begin_stream()
        while not over.is_set():
            await peer.chunk(event("x"))
            await asyncio.sleep(0.005)
        return await peer.end_stream()

    context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
    async with (
        ScriptedUpstream(ticking) as upstream,
        running(configured(certificates, upstream.port, rate)) as (app, server),
        AsyncExitStack() as stack,
    ):
        await until_ready(app)
        stream = await stack.enter_async_context(await come(server.port, context))
        await stream.post(chat(stream=True))
        assert (await stream.head()).status == 200
        await stream.chunk()
        began_at = time.monotonic()
        coming = [asyncio.create_task(come(server.port, context)) for _ in range(number)]
        num_pieces = 0
        while not all(task.done() for task in coming):
            assert await stream.chunk()
            num_pieces += 1
        took_s = time.monotonic() - began_at
        assert took_s >= (number - 2) / rate
        assert num_pieces > number / 2  # it was never without its turn for long
        for task in coming:
            client = await stack.enter_async_context(task.result())
            assert (await client.get("/health")).status == 200
        over.set()


@on_loop
async def test_one_that_never_says_hello_is_let_go_and_keeps_nobody_out(certificates: Path):
    context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configured(certificates, upstream.port, 1000.0, header_s=0.5)) as (_, server),
    ):
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        async with await come(server.port, context) as client:
            assert (await client.get("/health")).status == 200
        listener = server._server
        for sock in silent:
            sock.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""  # it closed
            sock.close()
        assert listener.num_handshakes == 0  # type: ignore[union-attr]


@on_loop
async def test_one_that_does_not_speak_tls_disturbs_nobody(certificates: Path):
    context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configured(certificates, upstream.port, 1000.0)) as (_, server),
    ):
        async with await RawClient.open(server.port) as plain:
            await plain.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await plain.ended()
        async with await come(server.port, context) as client:
            assert (await client.get("/health")).status == 200


@on_loop
async def test_after_its_close_nobody_is_taken(certificates: Path):
    context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
    async with (
        ScriptedUpstream(plain_server) as upstream,
        running(configured(certificates, upstream.port, 1.0)) as (_, server),
        await come(server.port, context) as client,  # the only one of this second
    ):
        assert (await client.get("/health")).status == 200
        port = server.port
        await server.stop()
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(come(port, context), 5.0)
