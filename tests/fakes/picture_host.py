"""A host of pictures: a real TLS server on the loopback interface, one response a path."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class PictureHost:
    """`responses` holds whole responses by path; a path with none is never answered."""

    def __init__(self) -> None:
        self.responses: dict[str, bytes] = {}
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.port = 0

    def url(self, path: str = "/", host: str = "localhost") -> str:
        return f"https://{host}:{self.port}{path}"

    @asynccontextmanager
    async def serving(self, authority: Path) -> AsyncIterator[PictureHost]:
        """With the certificate of a folder that `make_authority` has filled."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority / "server.pem", authority / "server.key")
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            path = head.split(b" ")[1].decode()
            if path not in self.responses:
                await reader.read()  # until the client has gone
                return
            writer.write(self.responses[path])
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()


def response(
    body: bytes, *, status: int = 200, kind: str = "image/png", headers: tuple[str, ...] = ()
) -> bytes:
    lines = [f"HTTP/1.1 {status} Some", f"content-type: {kind}", *headers]
    if not any(line.startswith(("content-length", "transfer")) for line in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(to: str, status: int = 302) -> bytes:
    return response(b"", status=status, headers=(f"location: {to}",))
