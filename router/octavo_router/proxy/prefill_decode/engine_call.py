"""One question of the router's own to an engine, whose answer is wanted whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from octavo_router.http.upstream_connection import Loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.http.response_head import ResponseHead
    from octavo_router.http.upstream_connection import UpstreamConnection
    from octavo_router.http.upstream_pool import OnItsWay
    from octavo_router.proxy.upstreams import Upstream

_MAX_BYTES: Final = 4 * 2**20


class EngineReply(NamedTuple):
    """What became of it. Where there was no whole answer, the status is 0, and `loss` says why."""

    status: int
    body: bytes = b""
    loss: Loss | None = None
    problem: str = ""


class EngineCall:
    """The user of one connection. `done` is called once, and not after `cancel`."""

    __slots__ = ("_connecting", "_connection", "_data", "_done", "_pieces", "_size", "_status")

    def __init__(self, data: bytes, done: Callable[[EngineReply], None]) -> None:
        self._data = data
        self._done: Callable[[EngineReply], None] | None = done
        self._connecting: OnItsWay | None = None
        self._connection: UpstreamConnection | None = None
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def start(self, upstream: Upstream) -> None:
        connection = upstream.pool.take()
        if connection is not None:
            self.on_connected(connection)
        else:
            self._connecting = upstream.pool.connect(self)

    def cancel(self) -> None:
        """The engine sees its client go, if it has not answered yet."""
        self._done = None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._connecting = None
        self._connection = connection
        connection.send(self, self._data)

    def on_whole(self, head: ResponseHead, body: bytes) -> None:
        self._end(EngineReply(head.status, body))

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _MAX_BYTES:
            done = self._done
            self.cancel()
            if done is not None:
                done(
                    EngineReply(0, loss=Loss.GARBAGE, problem=f"an answer above {_MAX_BYTES} bytes")
                )

    def on_end(self) -> None:
        self._end(EngineReply(self._status, b"".join(self._pieces)))

    def on_lost(self, loss: Loss, problem: str) -> None:
        self._connecting = None
        self._end(EngineReply(0, loss=loss, problem=problem))

    def _end(self, reply: EngineReply) -> None:
        self._connection = None
        done, self._done = self._done, None
        if done is not None:
            done(reply)
