"""A relay in front of an engine that can reset the connections of requests.

The engine's stream of signals goes on meanwhile: the router takes the engine for ready, and
requests to it fail, as behind a broken proxy or a full connection table.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from octavo_engine.protocol.endpoints import STREAM_PATH

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter


class RequestCutter:
    """An async context. Listens on `url`."""

    url = ""

    def __init__(self, port: int) -> None:
        self._port = port  # of the engine
        self._is_cut = False
        self._requests: set[StreamWriter] = set()  # clients' ends
        self._relays: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for relay in tuple(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        await asyncio.sleep(0)  # in which what was closed is let go

    def cut(self) -> None:
        self._is_cut = True
        for client in self._requests:
            client.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    async def _serve(self, reader: StreamReader, client: StreamWriter) -> None:
        relay = asyncio.current_task()
        assert relay is not None
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)
        try:
            await self._relay(reader, client)
        finally:
            client.close()

    async def _relay(self, reader: StreamReader, client: StreamWriter) -> None:
        first = await reader.read(2**16)
        is_request = STREAM_PATH.encode() not in first.partition(b"\r\n")[0]
        if is_request and self._is_cut:
            return
        if is_request:
            self._requests.add(client)
        with contextlib.suppress(OSError):
            answers, engine = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                engine.write(first)
                await asyncio.gather(_pump(reader, engine), _pump(answers, client))
            finally:
                engine.close()
        self._requests.discard(client)


async def _pump(reader: StreamReader, writer: StreamWriter) -> None:
    """Until either end closes; then both are closed."""
    with contextlib.suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()
