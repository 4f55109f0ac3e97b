"""The least a proxy in Python can do: it shows the ceiling of this stand, and routes nothing.

    python -m benchmarks.router.bare_proxy PORT URL...

Requests are cut at their length, sent round robin, answers passed on as they come.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop


class Upstream(asyncio.Protocol):
    """A connection to an engine; answers go to the client that sent last."""

    def __init__(self, idle: list[Upstream]) -> None:
        self.client: Client | None = None
        self.idle = idle
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self.client is not None
        self.client.transport.write(data)
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.idle.append(self)


class Client(asyncio.Protocol):
    """A connection from a client: one request after the other."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.received: list[bytes] = []
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        request = b"".join(self.received)
        self.received.clear()
        self.proxy.send(self, request)


class Proxy:
    """Connections to the engines, used in turn."""

    def __init__(self, urls: list[str]) -> None:
        self.targets = [(u.hostname or "", u.port or 80) for u in map(urlsplit, urls)]
        self.idle: list[list[Upstream]] = [[] for _ in urls]
        self.turn = 0
        self.tasks: set[asyncio.Task[Any]] = set()

    def send(self, client: Client, request: bytes) -> None:
        self.turn = (self.turn + 1) % len(self.targets)
        idle = self.idle[self.turn]
        if idle:
            upstream = idle.pop()
            upstream.client = client
            upstream.transport.write(request)
            return
        task = asyncio.get_running_loop().create_task(self._connect(self.turn, client, request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(self, index: int, client: Client, request: bytes) -> None:
        host, port = self.targets[index]
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(self.idle[index]), host, port)
        upstream.client = client
        upstream.transport.write(request)


async def main() -> None:
    proxy = Proxy(sys.argv[2:])
    server = await asyncio.get_running_loop().create_server(
        lambda: Client(proxy), "127.0.0.1", int(sys.argv[1]), backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
