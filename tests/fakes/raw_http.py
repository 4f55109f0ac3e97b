"""An HTTP server of which every byte is the test's own: it reads heads, the fake writes answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Self


class Head(NamedTuple):
    target: str
    headers: dict[str, str]  # names in lower case


@dataclass(kw_only=True)
class RawHttp:
    """Use as `async with`. Subclasses write what they answer in `answer`."""

    port: int = 0
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def answer(
        self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """ConnectionError ends the connection."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens, on the port it had before if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a SIGKILL looks from outside: connections are reset and nobody listens."""
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
            self._server = None

    def cut(self) -> None:
        """Resets every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                request, *lines = (
                    (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
                )
                pairs = (line.partition(":") for line in lines)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                head = Head(request.split()[1], headers)
                self.requests.append(head.target)
                await self.answer(head, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the router went away, which is its right
        finally:
            self._writers.discard(writer)
            writer.close()


def whole(writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str = "") -> None:
    """An answer of known length."""
    kind = b"content-type: %s\r\n" % content_type.encode() if content_type else b""
    head = b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (status, kind, len(body))
    writer.write(head + body)


def begin_chunks(writer: asyncio.StreamWriter, content_type: str) -> None:
    """An answer that goes on; then `chunk` by `chunk`."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
        % content_type.encode()
    )


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """The last one is empty."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
