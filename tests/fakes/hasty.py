"""Upstreams that answer before they have read the request, and leave its body where it is."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from tests.fakes.upstream import CHAT

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

LONG: Final = 6 * 2**20  # more than the sockets on the way take
EARLY: Final = json.dumps(CHAT).encode()
_TYPE: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def in_chunks(body: bytes) -> list[bytes]:
    head = _TYPE + b"transfer-encoding: chunked\r\n\r\n"
    return [head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)]


def with_length(body: bytes) -> list[bytes]:
    """Head and body."""
    return [_TYPE + b"content-length: %d\r\n\r\n" % len(body), body]


# What is written for an early answer, piece by piece.
ANSWERS: Final[Mapping[str, list[bytes]]] = {
    "in one piece": [b"".join(with_length(EARLY))],
    "in pieces": with_length(EARLY),
    "in chunks": in_chunks(EARLY),
}


class Hasty:
    """Answers each head at once, and reads no more of large bodies than has come by then."""

    def __init__(self, pieces: list[bytes] = ANSWERS["in one piece"]) -> None:
        self.pieces = pieces
        self.num_connections = 0
        self.port = 0
        self.reads_on = asyncio.Event()  # set at the end at the latest

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.num_connections
        self.num_connections += 1
        try:
            await self.answer(number, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def answer(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """All requests of one connection, which has this number."""
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in self.pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            await reader.readuntil(b"}]}")  # the end of a small body, or never


class Mistaken(Hasty):
    """Takes what is left of a body for the next request, and answers that to whoever asks then."""

    async def answer(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines(self.pieces)
        await self.reads_on.wait()
        await reader.readuntil(b"\r\n\r\n")  # the rest of a body: what a stranger wrote there
        stolen = json.dumps({"stolen from": number}).encode()
        is_chunked = b"chunked" in self.pieces[0]
        writer.writelines(in_chunks(stolen) if is_chunked else with_length(stolen))
        await reader.read()


class Deaf(Hasty):
    """Reads nothing more of bodies that are larger than that, until `reads_on`."""

    async def answer(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.writelines(self.pieces)
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            if size > 100_000:
                await self.reads_on.wait()
                return
            await reader.readexactly(size)


_H = TypeVar("_H", bound=Hasty)


@asynccontextmanager
async def listening(hasty: _H, tls: ssl.SSLContext | None = None) -> AsyncIterator[_H]:
    """It has a port, and takes little that it does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server = await asyncio.start_server(hasty.serve, sock=listener, limit=2**16, ssl=tls)
        hasty.port = listener.getsockname()[1]
        try:
            yield hasty
        finally:
            hasty.reads_on.set()
            server.close()
