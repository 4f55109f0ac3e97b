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
            server.close()

    assert asyncio.run(scenario()) == "connected"
