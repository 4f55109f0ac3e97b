"""The connections to one endpoint: the one used last is taken first, the others may age and end."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import TYPE_CHECKING, Final, Protocol

from octavo_router.http.deadlines import NEVER
from octavo_router.http.network import Network
from octavo_router.http.response_head import ResponseHeadParser
from octavo_router.http.upstream_connection import Loss, UpstreamConnection

if TYPE_CHECKING:
    import ssl

    from octavo_router.http.deadlines import DeadlineTick
    from octavo_router.http.upstream_connection import User

MAX_IDLE: Final = 1024
# What this machine lacks: file descriptors, ports, memory.
_OURS: Final = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
)


class OnItsWay(Protocol):
    """A connection that is being made."""

    def cancel(self) -> object: ...


class UpstreamPool:
    """Lives as long as the endpoint's address is known.

    `idle_s` is less than servers keep idle connections (uvicorn: 5 s), so that ours is the side
    that closes: a request sent into a closing connection is one whose fate is unknown.
    """

    __slots__ = (
        "_connecting", "_deadlines", "_host", "_idle", "_loop", "_network", "_open", "_parser",
        "_port", "_server_name", "_ssl", "connect_timeout_s", "deadline", "idle_s", "is_closed",
    )  # fmt: skip

    def __init__(
        self,
        host: str,
        port: int,
        *,
        deadlines: DeadlineTick,
        loop: asyncio.AbstractEventLoop,
        network: Network | None = None,
        ssl_context: ssl.SSLContext | None = None,
        server_name: str = "",
        idle_s: float,
        connect_timeout_s: float,
    ) -> None:
        self._host = host
        self._port = port
        self._deadlines = deadlines
        self._loop = loop
        self._network = network or Network(loop)
        self._ssl = ssl_context
        self._server_name = server_name or host
        self._parser = ResponseHeadParser()
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._connecting: set[OnItsWay] = set()
        self.idle_s = idle_s
        self.connect_timeout_s = connect_timeout_s
        self.is_closed = False
        self.deadline = NEVER
        deadlines.watch(self)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_open(self) -> int:
        """Connections, in use or idle."""
        return len(self._open)

    @property
    def num_connecting(self) -> int:
        return len(self._connecting)

    def replace_tls(self, context: ssl.SSLContext) -> None:
        """For connections from now on."""
        self._ssl = context

    def take(self, now: float = 0.0) -> UpstreamConnection | None:
        """An idle connection, if there is one that is young enough. `now`: if it is known."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.is_ending:  # what is sent there is lost, and nobody would know its fate
                continue
            if connection.idle_since + self.idle_s > (now or time.monotonic()):
                return connection
            connection.abort()  # the youngest: all are too old
            self._close_idle()
        return None

    def connect(self, user: User) -> OnItsWay:
        """Calls `user.on_connected`, or `user.on_lost` when it failed; neither after a cancel."""
        task = self._loop.create_task(self._connect(user))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    def give_back(self, connection: UpstreamConnection) -> None:
        if self.is_closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        now = time.monotonic()
        connection.idle_since = now
        if not self._idle:
            self.deadline = now + self.idle_s
        self._idle.append(connection)

    def on_opened(self, connection: UpstreamConnection) -> None:
        self._open.add(connection)

    def on_closed(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection.user is None and connection in self._idle:
            self._idle.remove(connection)

    def on_deadline(self, now: float) -> None:
        """Ends what is idle for too long: the front of the list."""
        oldest_allowed = now - self.idle_s
        num_old = 0
        for connection in self._idle:
            if connection.idle_since > oldest_allowed:
                break
            num_old += 1
        old, self._idle[:num_old] = self._idle[:num_old], []
        for connection in old:
            connection.abort()
        self.deadline = self._idle[0].idle_since + self.idle_s if self._idle else NEVER

    def close(self) -> None:
        """The endpoint is gone. Answers under way are finished by their users.

        So are connections on their way: who waits for one must learn how that ended.
        """
        self.is_closed = True
        self._deadlines.forget(self)
        self._close_idle()

    def _close_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    async def _connect(self, user: User) -> None:
        connection = UpstreamConnection(self, self._parser)
        try:
            await self._connect_in_time(connection)
        except TimeoutError:
            limit_s = self.connect_timeout_s
            user.on_lost(Loss.UNREACHABLE, f"did not accept a connection in {limit_s:g} s")
        except OSError as error:  # ssl.SSLError is one
            loss = Loss.NO_SOCKET if error.errno in _OURS else Loss.REFUSED
            user.on_lost(loss, error.strerror or "refused the connection")
        else:
            user.on_connected(connection)

    async def _connect_in_time(self, connection: UpstreamConnection) -> None:
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await self._network.connect(
                    lambda: connection,
                    self._host,
                    self._port,
                    tls=self._ssl,
                    server_name=self._server_name if self._ssl else None,
                )
        except BaseException:
            # It was made, and nobody waits for it any more: uvloop ends it without a word.
            self._open.discard(connection)
            raise
