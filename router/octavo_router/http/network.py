"""How connections are accepted and opened on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo_router.http.sockets import BACKLOG

if TYPE_CHECKING:
    import asyncio
    import socket
    import ssl
    from collections.abc import Callable, Sequence

P = TypeVar("P", bound="asyncio.Protocol")


class Listening(Protocol):
    """Accepts connections until `close`. asyncio.Server is one."""

    @property
    def sockets(self) -> Sequence[socket.socket]: ...
    def close(self) -> None: ...


class Network:
    """The connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def listen(
        self, factory: Callable[[], asyncio.Protocol], sock: socket.socket
    ) -> Listening:
        """For plain connections; those with TLS are `flow.handshakes.TlsListener`'s."""
        return await self._loop.create_server(factory, sock=sock, backlog=BACKLOG)

    async def connect(
        self,
        factory: Callable[[], P],
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> P:
        """Raises OSError."""
        _, protocol = await self._loop.create_connection(
            factory, host, port, ssl=tls, server_hostname=server_name
        )
        return protocol
