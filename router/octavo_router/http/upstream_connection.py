"""One connection to an endpoint: a request goes out, its answer comes back, then the next.

IDLE --send--> HEAD --> LENGTH | CHUNKED | UNTIL_CLOSE --> IDLE          or LOST, from anywhere
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from enum import Enum
from typing import Final, Protocol, cast

from octavo_router.http.chunked import ChunkDecoder, ChunkError
from octavo_router.http.response_head import ResponseError, ResponseHead, ResponseHeadParser

IDLE, AWAITING, LENGTH, CHUNKED, UNTIL_CLOSE, LOST = range(6)

_MAX_HEAD_BYTES: Final = 64 * 2**10
_MAX_INTERIM: Final = 8  # answers with a status below 200 before the one that counts
_RECEIVE_BUFFER_BYTES: Final = 64 * 2**10  # bounds what still comes after a pause
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 5, 2, 2
_USER_TIMEOUT_MS: Final = 10_000


class Loss(Enum):
    """How an answer was lost."""

    REFUSED = "refused"  # no connection: it never got the request
    UNREACHABLE = "unreachable"  # no connection in time
    NO_SOCKET = "no socket"  # this machine has none left: nothing was sent to the endpoint
    CLOSED = "closed"  # the connection ended before the first byte of an answer
    BROKEN = "broken"  # ... within the answer
    GARBAGE = "garbage"  # what came is no answer


class User(Protocol):
    """Who waits for the answer. After `on_end` or `on_lost` it is not called again."""

    def on_connected(self, connection: UpstreamConnection) -> None: ...

    def on_whole(self, head: ResponseHead, body: bytes) -> None:
        """The answer came in one piece: instead of `on_head`, `on_body` and `on_end`."""

    def on_head(self, head: ResponseHead) -> None: ...

    def on_body(self, data: bytes) -> None:
        """A part of the body, not empty."""

    def on_end(self) -> None:
        """The answer is whole. The connection may already be in use again."""

    def on_lost(self, loss: Loss, problem: str) -> None: ...


class ConnectionPool(Protocol):
    """The pool that a connection belongs to."""

    def on_opened(self, connection: UpstreamConnection) -> None: ...

    def on_closed(self, connection: UpstreamConnection) -> None: ...

    def give_back(self, connection: UpstreamConnection) -> None:
        """The response is complete: the connection may serve another request."""


class UpstreamConnection(asyncio.Protocol):
    """See the module. Hot: several calls for each request."""

    __slots__ = (
        "_buffer", "_decoder", "_head", "_is_paused", "_is_spoilt", "_left", "_num_interim",
        "_parser", "_pool", "_state", "_tls_fd", "_transport", "idle_since", "user",
    )  # fmt: skip

    def __init__(self, pool: ConnectionPool, parser: ResponseHeadParser) -> None:
        self._pool = pool
        self._parser = parser
        self._state = IDLE
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._left = 0
        self._decoder: ChunkDecoder | None = None
        self._is_spoilt = False  # it cannot be used again
        self._is_paused = False  # its user takes no more for now
        self._num_interim = 0
        self._tls_fd = -1  # of its socket, where the transport encrypts
        self.user: User | None = None
        self.idle_since = 0.0

    @property
    def is_ending(self) -> bool:
        """Its end is known, and `connection_lost` is still to come."""
        return self._transport.is_closing()

    def send(self, user: User, data: bytes) -> None:
        """One whole request; not HEAD, whose answers have no bodies."""
        self.user = user
        self._num_interim = 0
        self._state = AWAITING
        self._transport.write(data)

    def abort(self) -> None:
        """Nobody wants the answer any more: the endpoint learns it from the connection's end."""
        self.user = None
        self._state = LOST
        self._transport.abort()

    def pause(self) -> None:
        if self._state not in (IDLE, LOST):
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._state != LOST:
            self._is_paused = False
            self._transport.resume_reading()

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._pool.on_opened(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            _tune(sock)
            if transport.get_extra_info("sslcontext") is not None:
                self._tls_fd = sock.fileno()

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state == AWAITING:
            self._take_head(self._buffer + data if self._buffer else data)
        elif state == LENGTH:
            self._take_length(data)
        elif state == CHUNKED:
            self._take_chunks(data)
        elif state == UNTIL_CLOSE:
            cast("User", self.user).on_body(data)
        else:  # unasked for: whatever it answers, it is not the next request
            self._drop()

    def eof_received(self) -> bool:
        return False  # closes; connection_lost is next

    def connection_lost(self, error: Exception | None) -> None:
        state, self._state = self._state, LOST
        self._pool.on_closed(self)
        user, self.user = self.user, None
        if user is None:
            return
        if state == UNTIL_CLOSE and error is None:
            user.on_end()
        elif state == AWAITING and not self._buffer:
            user.on_lost(Loss.CLOSED, "closed the connection without an answer")
        else:
            user.on_lost(Loss.BROKEN, "closed the connection within its answer")

    # -- reading an answer

    def _take_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > _MAX_HEAD_BYTES:
            self._buffer = data
            if len(data) > _MAX_HEAD_BYTES:
                self._garbage("its headers are too large")
            elif not b"HTTP/1.".startswith(data[:7]):
                self._garbage("it does not begin with an HTTP/1.1 status")
            elif b"\n\n" in data:
                self._garbage("a line does not end in CRLF")
            return
        fields = data[:end]
        head = self._parser.known.get(fields)  # mostly; `parse` without its frame
        if head is None:
            try:
                head = self._parser.parse(fields)
            except ResponseError as error:
                self._garbage(str(error))
                return
        self._buffer = b""
        rest = data[end + 4 :]
        if head.status < 200:
            self._num_interim += 1
            if self._num_interim > _MAX_INTERIM or head.status == 101:
                self._garbage("it is preceded by too many interim ones")
            elif rest:
                self._take_head(rest)
            return
        user = cast("User", self.user)
        is_whole = head.content_length == len(rest) and head.keep_alive
        if is_whole and not self._has_unsent():  # mostly all comes at once
            self.user = None
            self._state = IDLE
            self._pool.give_back(self)
            user.on_whole(head, rest)
            return
        self._head = head
        self._is_spoilt = not head.keep_alive
        if head.is_chunked:
            self._state = CHUNKED
            self._decoder = ChunkDecoder(is_strict=False)
            user.on_head(head)
            if rest and self._state == CHUNKED:
                self._take_chunks(rest)
        elif head.content_length is None:
            self._state = UNTIL_CLOSE
            user.on_head(head)
            if rest and self._state == UNTIL_CLOSE:
                user.on_body(rest)
        else:
            self._state = LENGTH
            self._left = head.content_length
            user.on_head(head)
            if self._state == LENGTH:
                self._take_length(rest)

    def _take_length(self, data: bytes) -> None:
        left = self._left - len(data)
        if left < 0:  # the next answer cannot be separated from the rest of this one
            data = data[: self._left]
            self._is_spoilt = True
        self._left = left
        user = cast("User", self.user)
        if data:
            user.on_body(data)
        if left <= 0 and self.user is user:
            self._end()

    def _take_chunks(self, data: bytes) -> None:
        decoder = cast("ChunkDecoder", self._decoder)
        user = cast("User", self.user)
        try:
            pieces = decoder.feed(data)
        except ChunkError as error:
            self._garbage(str(error))
            return
        if pieces:
            user.on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if decoder.is_done and self.user is user:
            if decoder.rest:
                self._is_spoilt = True
            self._end()

    def _end(self) -> None:
        """The connection goes back first: what the user does next may need it.

        Not where a part of the request is still here: the endpoint answered without it, and what it
        takes that for when it comes would go to the next client.
        """
        user, self.user = cast("User", self.user), None
        self._head = self._decoder = None
        if self._is_spoilt or self._has_unsent():
            self._drop()
        else:
            self.resume()  # its user paused it with the end in hand; the next one must hear
            self._state = IDLE
            self._pool.give_back(self)
        user.on_end()

    def _has_unsent(self) -> bool:
        """It was answered before it had all of the request.

        Who answers early may not read the rest, or may take it for a request: what comes next on
        this connection would be an answer to that.
        """
        if self._transport.get_write_buffer_size():
            return True
        return self._tls_fd >= 0 and _num_unacknowledged(self._tls_fd) > 0

    def _garbage(self, problem: str) -> None:
        user, self.user = self.user, None
        has_begun = self._state != AWAITING
        self._drop()
        if user is not None:
            user.on_lost(Loss.BROKEN if has_begun else Loss.GARBAGE, problem)

    def _drop(self) -> None:
        self._state = LOST
        self._buffer = b""
        self._pool.on_closed(self)
        self._transport.abort()


def _num_unacknowledged(fd: int) -> int:
    """Bytes that the kernel still has to send, or to hear of.

    A transport that encrypts does not count what waits behind the encryption. That can only be
    where the kernel has as much as it takes.
    """
    try:
        queued = fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4))
    except OSError:  # not known of sockets on this platform
        return 0
    return int.from_bytes(queued, sys.byteorder)


def _tune(sock: socket.socket) -> None:
    """A host that vanishes without a word is noticed within ten seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
