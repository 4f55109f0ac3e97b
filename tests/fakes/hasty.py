"""An upstream that answers before it has read the request, and then takes bodies for requests."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.fakes.upstream import CHAT

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

LONG = 6 * 2**20  # more than the sockets on the way take
EARLY = json.dumps(CHAT).encode()


class Hasty:
    """Answers each head at once and leaves the body where it is, until it takes it for heads."""

    def __init__(self, framing: str) -> None:
        self.framing = framing
        self.num_connections = 0
        self.port = 0
        self.reads_on = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.num_connections
        self.num_connections += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer(EARLY))
            await self.reads_on.wait()
            await reader.readuntil(b"\r\n\r\n")  # the rest of a body: what a stranger wrote there
            writer.write(self.answer(json.dumps({"stolen from": number}).encode()))
            await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    def answer(self, body: bytes) -> bytes:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        if self.framing == "length":
            return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks


@asynccontextmanager
async def hasty(framing: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Hasty]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        upstream = Hasty(framing)
        server = await asyncio.start_server(upstream.serve, sock=listener, limit=2**16, ssl=tls)
        upstream.port = listener.getsockname()[1]
        try:
            yield upstream
        finally:
            upstream.reads_on.set()
            server.close()
