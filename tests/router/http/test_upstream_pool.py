"""Connections to one endpoint, and what becomes of them when it goes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from octavo_router.http.deadlines import DeadlineTick
from octavo_router.http.upstream_pool import UpstreamPool

if TYPE_CHECKING:
    from octavo_router.http.upstream_connection import User


class Asker:
    """Waits for a connection."""

    def __init__(self) -> None:
        self.heard = asyncio.get_running_loop().create_future()

    def on_connected(self, connection) -> None:
        connection.abort()
        self.heard.set_result("connected")

    def on_lost(self, loss, problem) -> None:
        self.heard.set_result(loss)


async def ended(server: asyncio.Server) -> None:
    """Its connections too: their sockets are closed in the loop's next turns."""
    server.close()
    for _ in range(5):
        await asyncio.sleep(0.002)


def test_who_waits_for_a_connection_hears_of_it_though_the_endpoint_goes_meanwhile():
    async def scenario() -> object:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = UpstreamPool(
            "127.0.0.1", port, deadlines=DeadlineTick(loop), loop=loop, idle_s=4.0,
            connect_timeout_s=2.0,
        )  # fmt: skip
        asker = Asker()
        pool.connect(cast("User", asker))
        pool.close()
        try:
            async with asyncio.timeout(60.0):
                return await asker.heard
        finally:
            await ended(server)

    assert asyncio.run(scenario()) == "connected"


class SlowReader(Asker):
    """Takes no more of a response from its first bytes on, and learns of its end all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.connected = asyncio.get_running_loop().create_future()

    def on_connected(self, connection) -> None:
        self.connection = connection
        self.connected.set_result(None)

    def ask(self) -> None:
        self.heard = asyncio.get_running_loop().create_future()
        self.connection.send(cast("User", self), b"GET / HTTP/1.1\r\nhost: e\r\n\r\n")

    def on_head(self, head) -> None:
        pass

    def on_body(self, data) -> None:
        self.connection.pause()

    def on_whole(self, head, body) -> None:
        self.heard.set_result(body)

    def on_end(self) -> None:
        self.heard.set_result("end")


def test_a_connection_paused_in_the_last_bytes_of_a_response_reads_the_next_one():
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (chunked, whole):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        await reader.read()
        writer.close()

    async def scenario() -> tuple[object, object]:
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = UpstreamPool(
            "127.0.0.1", server.sockets[0].getsockname()[1], deadlines=DeadlineTick(loop),
            loop=loop, idle_s=4.0, connect_timeout_s=2.0,
        )  # fmt: skip
        asker = SlowReader()
        pool.connect(cast("User", asker))
        try:
            async with asyncio.timeout(30.0):
                await asker.connected
                asker.ask()
                first = await asker.heard
                asker.ask()
                return first, await asker.heard
        finally:
            pool.close()
            await ended(server)

    assert asyncio.run(scenario()) == ("end", b"yes")
