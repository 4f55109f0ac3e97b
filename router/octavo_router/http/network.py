"""How connections are accepted and opened: who moves the bytes between a socket and its protocol.

Plain ones are native code's where that was built (csrc/router/sockets): a wakeup of the loop serves
all that are ready, straight from the kernel to the protocol and back. TLS is the loop's own.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Callable, Sequence

    from octavo_router._fast import Lane, Opening, Poller

P = TypeVar("P", bound="asyncio.Protocol")


class Listening(Protocol):
    """Accepts connections until `close`. asyncio.Server is one."""

    @property
    def sockets(self) -> Sequence[socket.socket]: ...
    def close(self) -> None: ...


class Network:
    """The sockets of one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_poller: Callable[[asyncio.AbstractEventLoop], Poller] | None = None,
    ) -> None:
        """`make_poller`: of the native module; None leaves all to the loop."""
        self._loop = loop
        self._make_poller = make_poller
        self._poller: Poller | None = None  # from the first socket on
        self._taker: Lane | None = None

    def show_first(self, taker: Lane) -> None:
        """It sees what plain connections receive before their protocols do."""
        self._taker = taker
        if self._poller is not None:
            self._poller.show_first(taker)

    async def listen(
        self, factory: Callable[[], asyncio.Protocol], sock: socket.socket
    ) -> Listening:
        """For plain connections; those with TLS are `flow.handshakes.TlsListener`'s."""
        poller = self._plain()
        if poller is None:
            return await self._loop.create_server(factory, sock=sock)
        sock.setblocking(False)
        poller.listen(sock, factory)
        return _PlainListening(poller, sock)

    def open(
        self,
        protocol: asyncio.Protocol,
        host: str,
        port: int,
        on_done: Callable[[OSError | None], None],
    ) -> Opening | None:
        """A plain connection without a task: `on_done` hears None when the protocol has it.

        Unless it is cancelled before. None where it takes a task: `connect` does that.
        """
        poller = self._plain()
        return None if poller is None else poller.open(host, port, protocol, on_done)

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
        poller = self._plain() if tls is None else None
        if poller is None:
            _, protocol = await self._loop.create_connection(
                factory, host, port, ssl=tls, server_hostname=server_name
            )
            return protocol
        sock = await self._open(host, port)
        protocol = factory()
        poller.adopt(sock, protocol)
        return protocol

    def close(self) -> None:
        """Whatever is open ends, and nobody is told."""
        poller, self._poller = self._poller, None
        if poller is not None:
            self._loop.remove_reader(poller.fileno())
            poller.close()

    def _plain(self) -> Poller | None:
        if self._make_poller is None:
            return None
        if self._poller is None:
            self._poller = self._make_poller(self._loop)
            if self._taker is not None:
                self._poller.show_first(self._taker)
            self._loop.add_reader(self._poller.fileno(), self._poller.poll)
        return self._poller

    async def _open(self, host: str, port: int) -> socket.socket:
        """A socket that is connected to one of the host's addresses, in their order."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        problem: OSError | None = None
        for family, kind, number, _, address in found:
            sock = socket.socket(family, kind, number)
            try:
                sock.setblocking(False)
                await self._loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                problem = problem or error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise problem or OSError(f"{host} has no address")


class _PlainListening:
    def __init__(self, poller: Poller, sock: socket.socket) -> None:
        self._poller = poller
        self._sockets: tuple[socket.socket, ...] = (sock,)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        return self._sockets

    def close(self) -> None:
        for sock in self._sockets:
            self._poller.ignore(sock)
            sock.close()
        self._sockets = ()
