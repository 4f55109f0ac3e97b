"""TLS connections are taken at a rate that leaves time for those that are there.

A handshake costs a core more than most requests. Clients that all come back at once wait in the
kernel's queue for their turn, so that streams under way go on; one that says nothing is let go.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from octavo_router.flow.buckets import Bucket

if TYPE_CHECKING:
    import asyncio
    import socket
    import ssl
    from collections.abc import Callable

    from octavo_router.http.connection_settings import Shared

logger = logging.getLogger("octavo.router")

_AT_ONCE_S: Final = 0.02  # of a second's handshakes may begin together
_NO_FILES_S: Final = 0.1  # before the next look, where no socket can be had


class TlsListener:
    """In place of an `asyncio.Server`, where connections begin with a handshake."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        shared: Shared,
    ) -> None:
        self.sockets = (listener,)
        self._listener = listener
        self.context = context  # of connections from now on
        self._make_protocol = make_protocol
        self._shared = shared
        self._loop = shared.loop
        self._handshakes: set[asyncio.Task[None]] = set()
        self._bucket = Bucket(1.0, 1.0, time.monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def num_handshakes(self) -> int:
        return len(self._handshakes)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Takes no more; handshakes that have begun go on."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _listen(self) -> None:
        self._timer = None
        rate = self._shared.limits.max_tls_handshakes_per_s  # a reload may have changed it
        if rate != self._bucket.rate_per_s:
            self._bucket = Bucket(rate, max(1.0, rate * _AT_ONCE_S), time.monotonic())
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """As many as may come now; then the kernel keeps them for a while."""
        now = time.monotonic()
        while not (wait_s := self._bucket.wait_s(1.0, now)):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                logger.warning("Cannot take connections: %s", error.strerror)
                wait_s = _NO_FILES_S
                break
            self._bucket.take(1.0, now)
            if len(self._handshakes) >= self._shared.max_connections:
                sock.close()
                continue
            task = self._loop.create_task(self._shake_hands(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(wait_s, self._listen)

    async def _shake_hands(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        limit_s = self._shared.timeouts.header_s
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, sock, ssl=self.context, ssl_handshake_timeout=limit_s
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            logger.debug("TLS handshake failed: %s", error)
