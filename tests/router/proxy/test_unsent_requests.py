"""An engine answers before it has read the request: what is still to be sent is nobody else's."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop, routing_to
from tests.fakes.upstream import CHAT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LARGE = chat(messages=[{"role": "user", "content": "x" * 7_000_000}])
BODY = json.dumps(CHAT).encode()
TYPE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
ANSWERS = {
    "in one piece": [TYPE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY],
    "in pieces": [TYPE + b"content-length: %d\r\n\r\n" % len(BODY), BODY],
    "in chunks": [
        TYPE + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    ],
}


class Hasty:
    """Answers each head at once, and reads no more of large bodies than has come by then."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in self.pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.01)
                await reader.readuntil(b"}]}")  # the end of a small body, or never
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(hasty: Hasty) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(hasty.serve, sock=listener)
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize("pieces", ANSWERS.values(), ids=list(ANSWERS))
@on_loop
async def test_a_connection_with_a_part_of_a_request_still_to_send_serves_nobody_else(
    pieces: list[bytes],
):
    hasty = Hasty(pieces)
    async with (
        listening(hasty) as port,
        routing_to(port) as rig,
        await RawClient.open(rig.port) as client,
        await RawClient.open(rig.port) as other,
    ):
        for _ in range(2):  # the second time with a head that is known
            answer = await client.ask(LARGE)
            assert (answer.status, answer.json) == (200, CHAT)
            pool = rig.upstreams.of(rig.endpoints[0]).pool
            assert pool.num_idle == 0
            before = hasty.num_connections
            assert (await other.ask(chat())).status == 200
            assert hasty.num_connections == before + 1
            pool._close_idle()
        await rig.settled()


@on_loop
async def test_a_connection_whose_request_has_left_is_kept():
    hasty = Hasty(ANSWERS["in one piece"])
    async with (
        listening(hasty) as port,
        routing_to(port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        await client.ask(chat())
        before = hasty.num_connections
        for _ in range(3):
            assert (await client.ask(chat())).status == 200
        assert hasty.num_connections == before
        await rig.settled()


class Deaf(Hasty):
    """Reads nothing more of what is larger than that, until it is let."""

    def __init__(self) -> None:
        super().__init__(ANSWERS["in one piece"])
        self.is_over = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self.pieces[0])
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                if size > 100_000:
                    await self.is_over.wait()
                    return
                await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@on_loop
async def test_a_connection_that_was_kept_before_is_not_kept_with_a_part_still_to_send():
    """Native code takes these: the connection is there, and the answer's head is known."""
    deaf = Deaf()
    async with (
        listening(deaf) as port,
        routing_to(port) as rig,
        await RawClient.open(rig.port) as client,
    ):
        for _ in range(3):
            assert (await client.ask(chat())).status == 200
        pool = rig.upstreams.of(rig.endpoints[0]).pool
        assert (pool.num_idle, deaf.num_connections) == (1, 1)
        assert (await client.ask(LARGE)).json == CHAT
        assert (pool.num_idle, deaf.num_connections) == (0, 1)
        assert (await client.ask(chat())).status == 200
        assert deaf.num_connections == 2
        deaf.is_over.set()
        await rig.settled()
