"""Answers of the router's own routes: a handler's reply, whole or streamed, onto the connection."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from octavo_router.errors import Rejected
from octavo_router.http import responses
from octavo_router.http.chunked import LAST_CHUNK, chunk
from octavo_router.http.deadlines import NEVER
from octavo_router.http.messages import Headers, Inbound, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from octavo_router.http.client_connection import ClientConnection
    from octavo_router.http.messages import Handler
    from octavo_router.http.request_head import RequestHead

logger = logging.getLogger("octavo.router")


def inbound(
    connection: ClientConnection, head: RequestHead, body: bytes, *, is_admin: bool = False
) -> Inbound:
    return Inbound(
        method=head.method,
        path=head.path,
        query=head.query,
        headers=Headers(head.fields),
        body=body,
        client=connection.client,
        is_admin=is_admin,
    )


class LocalResponse:
    """Runs one handler. Those that return at once cost no task."""

    __slots__ = (
        "_connection", "_flushed", "_head", "_is_admin", "_is_begun", "_request_id", "_task",
    )  # fmt: skip

    def __init__(
        self,
        connection: ClientConnection,
        head: RequestHead,
        request_id: str,
        *,
        is_admin: bool = False,
    ) -> None:
        self._is_admin = is_admin
        self._connection = connection
        self._head = head
        self._request_id = request_id
        self._task: asyncio.Task[None] | None = None
        self._flushed: asyncio.Event | None = None  # of a stream: the client keeps up
        self._is_begun = False

    def start(self, handler: Handler, body: bytes) -> None:
        """Raises Rejected."""
        self._connection.owner = self
        connection, head = self._connection, self._head
        reply = handler(inbound(connection, head, body, is_admin=self._is_admin))
        if isinstance(reply, Reply) and isinstance(reply.body, bytes):
            self._write_whole(reply, reply.body)
            return
        self._task = asyncio.get_running_loop().create_task(self._run(reply))

    async def _run(self, reply: Reply | Awaitable[Reply]) -> None:
        connection = self._connection
        try:
            if not isinstance(reply, Reply):
                reply = await reply
            if isinstance(reply.body, bytes):
                self._write_whole(reply, reply.body)
            else:
                await self._write_stream(reply, reply.body)
        except Rejected as error:
            if self._is_begun:
                connection.abort()
            else:
                connection.refuse(error, self._request_id)
        except Exception:  # a defect: the client learns that it is our fault, no more
            logger.exception("Unhandled error in request", extra={"request_id": self._request_id})
            if self._is_begun:
                connection.abort()
            else:
                ours = Rejected(
                    500, "internal_error", "The router failed with an internal error.", close=True
                )
                connection.refuse(ours, self._request_id)

    def _write_whole(self, reply: Reply, body: bytes) -> None:
        connection, head = self._connection, self._head
        keep_alive = not connection.wants_close
        connection.write(
            responses.whole(
                reply.status,
                body,
                request_id=self._request_id,
                content_type=reply.content_type,
                fields=reply.headers,
                lines=head.answer_lines,
                keep_alive=keep_alive,
                is_http10=head.is_http10,
                is_head=head.method == "HEAD",
            )
        )
        connection.finish(keep_alive=keep_alive)

    async def _write_stream(self, reply: Reply, body: AsyncIterator[bytes]) -> None:
        connection = self._connection
        is_chunked = not self._head.is_http10
        keep_alive = is_chunked and not connection.wants_close
        self._flushed = asyncio.Event()
        self._is_begun = connection.has_begun = True
        connection.write(
            responses.streamed_head(
                reply.status,
                request_id=self._request_id,
                content_type=reply.content_type,
                fields=reply.headers,
                lines=self._head.answer_lines,
                is_chunked=is_chunked,
                keep_alive=keep_alive,
            )
        )
        try:
            async for piece in body:
                if connection.is_paused:
                    self._flushed.clear()
                    await self._flushed.wait()
                if piece:
                    connection.write(chunk(piece) if is_chunked else piece)
        finally:
            close = getattr(body, "aclose", None)
            if close is not None:
                await cast("Awaitable[None]", close())
        if is_chunked:
            connection.write(LAST_CHUNK)
        connection.finish(keep_alive=keep_alive)

    # -- as the connection's owner

    def client_gone(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def client_paused(self) -> None:
        """The stream looks itself."""

    def client_resumed(self) -> None:
        self._connection.deadline = NEVER
        if self._flushed is not None:
            self._flushed.set()

    def client_too_slow(self) -> None:
        """Its connection ends, and with it the handler."""

    def probe(self) -> bytes:
        return b""

    def on_deadline(self, now: float) -> None:
        """There is none: handlers bound themselves."""

    def shut_down(self, error: Rejected) -> None:
        self._connection.abort()
