"""The sockets of an HTTP client: all closed when it ends, also those that aiohttp has let go of.

A request cancelled in the middle of its answer leaves a TLS connection that says farewell in the
background, and is not awaited: a loop that ends meanwhile leaves an open socket behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref
from typing import TYPE_CHECKING, Any, Self

import aiohttp

if TYPE_CHECKING:
    import ssl

# A turn of the loop or two is what it takes, unless a machine is very busy.
CLOSE_S = 1.0
LOOK_S = 0.005


class HttpSession:
    """An aiohttp session. `async with`: behind it nothing of it is open."""

    def __init__(
        self, *, tls: ssl.SSLContext | None = None, limit: int = 100, **settings: Any
    ) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        connector = aiohttp.TCPConnector(
            ssl=tls if tls is not None else True, limit=limit, socket_factory=self._open
        )
        self.http = aiohttp.ClientSession(connector=connector, **settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.http.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while left := [each for each in self._sockets if each.fileno() >= 0]:
                    for each in left:
                        # To its transport this looks as if the server had left: it closes at once.
                        with contextlib.suppress(OSError):
                            each.shutdown(socket.SHUT_RDWR)
                    await asyncio.sleep(LOOK_S)

    def _open(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, _ = address
        opened = socket.socket(family, kind, protocol)
        self._sockets.add(opened)
        return opened


class HttpSessions:
    """Those that others close, such as kopf at each login. `async with`: the rest is closed behind
    it; nothing is kept of those that are closed already."""

    def __init__(self) -> None:
        self._sessions: list[HttpSession] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions:
            await session.close()

    async def keep(self, session: HttpSession) -> None:
        closed = [each for each in self._sessions if each.http.closed]
        self._sessions = [each for each in self._sessions if not each.http.closed] + [session]
        for each in closed:
            await each.close()  # sockets that say farewell in the background
