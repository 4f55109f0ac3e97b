"""One connection of a client: requests are read off it in order, bounded in size and time.

    HEAD --> BODY --> BUSY --> HEAD ...        and from anywhere --> LINGER --> CLOSED

While it is BUSY an owner writes the answer, is notified of pauses and of the client's leaving,
and ends it with `finish`. What the client sends meanwhile waits, within a bound.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from octavo_router.errors import Rejected
from octavo_router.http import responses
from octavo_router.http.chunked import ChunkDecoder, ChunkError
from octavo_router.http.deadlines import NEVER
from octavo_router.http.request_head import RequestHead, too_large

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.config.settings import LimitsConfig, TimeoutsConfig
    from octavo_router.http.deadlines import DeadlineTick
    from octavo_router.http.request_head import HeadParser

HEAD, BODY, BUSY, LINGER, CLOSED = range(5)

_LINGER_S: Final = 2.0  # for the answer to arrive before the reset that unread bytes cause
_PROBE_DELAYS_S: Final = (0.02, 0.1, 0.5)
_TCP_CLOSE: Final = 7  # of Linux' tcpi_state
_DISCARD_UNSENT: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class ConnectionOwner(Protocol):
    """Who answers the request under way. May set the connection's `deadline`."""

    def client_gone(self) -> None:
        """The connection is lost; nothing can be written any more, `finish` need not be called."""

    def client_paused(self) -> None:
        """Too much is unsent: stop writing soon."""

    def client_resumed(self) -> None:
        """All is sent. Set the deadline again."""

    def client_too_slow(self) -> None:
        """It took nothing for too long. The connection is ended next."""

    def probe(self) -> bytes:
        """Bytes that a client ignores at this point of the answer; b"" if there are none."""

    def on_deadline(self, now: float) -> None: ...

    def shut_down(self, error: Rejected) -> None:
        """It may not go on: the client gets an error, where that is possible."""


class RequestHandler(Protocol):
    """What the requests are for."""

    def new_request_id(self) -> str: ...

    def check(self, connection: ClientConnection, head: RequestHead) -> None:
        """Before the body is read. Raises Rejected."""

    def handle(self, connection: ClientConnection, head: RequestHead, body: bytes) -> None:
        """Becomes the owner, or answers at once; in the end calls `finish`. Raises Rejected."""

    def refused(self, connection: ClientConnection, error: Rejected, request_id: str) -> None:
        """A request was answered with an error here, under this id."""


class ConnectionSettings(Protocol):
    """What the connections of one process have in common; see connection_settings.Shared."""

    service: RequestHandler
    limits: LimitsConfig
    timeouts: TimeoutsConfig
    deadlines: DeadlineTick
    loop: asyncio.AbstractEventLoop
    parser: HeadParser
    connections: set[ClientConnection]
    max_connections: int
    on_body: Callable[[int], None]
    is_closing: bool


class ClientConnection(asyncio.Protocol):
    """See the module. Hot: one for each connection, several calls for each request."""

    __slots__ = (
        "_body", "_body_left", "_buffer", "_client", "_decoder", "_has_skipped",
        "_is_advancing", "_memo", "_memo_head", "_memo_size", "_num_probes", "_shared", "_state",
        "_transport", "context", "deadline", "has_begun", "head", "is_half_closed", "is_paused",
        "owner", "write",
    )  # fmt: skip

    def __init__(self, shared: ConnectionSettings) -> None:
        self._shared = shared
        self._state = HEAD
        self._buffer = b""  # read and not used
        self._body: list[bytes] = []
        self._body_left = 0
        self._decoder: ChunkDecoder | None = None
        self._client: str | None = None  # read from the transport once
        self._memo = b""  # the last head's bytes: a client mostly repeats itself
        self._memo_head: RequestHead | None = None
        self._memo_size = 0  # of a whole request with that head; 0 where it is not known
        self._is_advancing = False
        self._has_skipped = False  # an empty line, since the last head
        self._num_probes = 0
        self.head: RequestHead | None = None  # of the request under way
        self.context: Any = None  # of the service: from `check` to `handle`
        self.owner: ConnectionOwner | None = None
        self.has_begun = False  # bytes of the answer were written
        self.is_paused = False
        self.is_half_closed = False
        self.deadline = NEVER

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write
        shared = self._shared
        self._transport.set_write_buffer_limits(high=shared.limits.write_buffer_bytes, low=0)
        if len(shared.connections) >= shared.max_connections:
            error = Rejected(
                503, "too_many_connections", "The router has too many open connections.",
                retry_after_s=1.0, close=True,
            )  # fmt: skip
            self._refuse(error)
            return
        shared.connections.add(self)
        self.deadline = time.monotonic() + shared.timeouts.header_s
        shared.deadlines.watch(self)

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state == HEAD and not self.is_paused:
            is_first = not self._buffer
            if is_first and len(data) == self._memo_size and data.startswith(self._memo):
                self._take_known(data)
                return
            self._buffer = data if is_first else self._buffer + data
            self._advance()
            if is_first and self._state == HEAD and self._buffer:
                self.deadline = time.monotonic() + self._shared.timeouts.header_s
        elif state == BODY:
            try:
                self._take_body(data)
            except Rejected as error:
                self._refuse(error)
                return
            self._advance()
        elif state in (BUSY, HEAD):  # until the last answer is over, and was taken
            self._buffer += data
            if len(self._buffer) > self._shared.limits.max_pipelined_bytes:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        if self._state != BUSY:
            # What it has sent is answered as soon as it takes the answers before.
            self.is_half_closed = self._state == HEAD and self.is_paused and bool(self._buffer)
            return self.is_half_closed
        # A client that has left looks the same as one that only has no more to say, until
        # something is sent to it: the former's machine answers with a reset.
        self.is_half_closed = True
        self._probe()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._state = CLOSED
        self.deadline = NEVER
        self._shared.deadlines.forget(self)
        self._shared.connections.discard(self)
        self._buffer, self._body = b"", []
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.client_gone()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self.owner is not None or self._state == HEAD:
            self.deadline = time.monotonic() + self._shared.timeouts.write_s
        if self.owner is not None:
            self.owner.client_paused()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.owner is not None:
            self.deadline = NEVER
            self.owner.client_resumed()
        elif self._state == HEAD:
            self._await_next()

    def on_deadline(self, now: float) -> None:
        state = self._state
        if state == BUSY and self.owner is not None:
            if not self.is_paused:
                self.owner.on_deadline(now)
                return
            self.owner.client_too_slow()
            self._reset()
        elif state == BODY:
            self._refuse(Rejected(408, "body_timeout", "The body arrived too slowly.", close=True))
        elif state == LINGER:
            self.abort()
        elif state != HEAD or self.is_paused:  # the rest of the answer does not get away
            self._reset()
        elif self._buffer:
            self._refuse(
                Rejected(408, "header_timeout", "The headers arrived too slowly.", close=True)
            )
        else:
            self._close()

    # -- for the owner

    @property
    def client(self) -> str:
        """The address of the peer."""
        if self._client is None:
            peer = self._transport.get_extra_info("peername")
            self._client = str(peer[0]) if peer else ""
        return self._client

    @property
    def keeps_open(self) -> bool:
        """Whether HTTP/1.1 goes on here, which need not be said."""
        head = self.head
        return (
            head is not None
            and head.keep_alive
            and not (head.is_http10 or self._shared.is_closing or self.is_half_closed)
        )

    @property
    def wants_close(self) -> bool:
        """Whether this answer is the connection's last one, and should say so."""
        head = self.head
        return (
            head is None
            or not head.keep_alive
            or self._shared.is_closing
            or (self.is_half_closed and not self._buffer)
        )

    def finish(self, *, keep_alive: bool) -> None:
        """The answer is written. What comes next begins."""
        self.owner = None
        self.has_begun = False
        self.context = None
        if self._state != BUSY:
            return
        shared = self._shared
        if not keep_alive or shared.is_closing:  # which may have come after the answer's head
            self._close()
            return
        self._state = HEAD
        self._await_next()

    def refuse(self, error: Rejected, request_id: str) -> None:
        """Answers with an error, and finishes."""
        keep_alive = not (error.close or self.wants_close)
        self.write(responses.refusal(error, request_id, self.head, keep_alive=keep_alive))
        self.finish(keep_alive=keep_alive)

    def abort(self) -> None:
        """Ends the connection now; what is unsent is lost, and the client can tell."""
        self._state = CLOSED
        self._transport.abort()

    def _reset(self) -> None:
        """As `abort`, and the kernel forgets what is unsent: else it keeps that until the client
        takes it."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):  # it is closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD_UNSENT)
        self.abort()

    @property
    def awaited_bytes(self) -> int:
        """Of a body that is coming; of one that does not tell its length, as much again."""
        return self._body_left if self._state == BODY else 0

    def close_when_idle(self) -> None:
        """For shutting down: an idle connection ends at once, others with their answer."""
        if self._state == HEAD and not self._buffer:
            self._close()

    # -- reading requests

    def _await_next(self) -> None:
        """The next request's turn: of one that is here already, unless its client does not read.

        Who asks and asks without taking an answer would have them all kept here.
        """
        timeouts, now = self._shared.timeouts, time.monotonic()
        if self.is_paused:
            self.deadline = now + timeouts.write_s
            return
        self.deadline = now + timeouts.idle_s
        if self._buffer and not self._is_advancing:
            self.deadline = now + timeouts.header_s
            if len(self._buffer) > self._shared.limits.max_pipelined_bytes:
                self._transport.resume_reading()
            self._advance()
        elif self.is_half_closed and not self._buffer:
            self._close()

    def _advance(self) -> None:
        """Takes requests off the buffer for as long as they are answered at once."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._state == HEAD and self._buffer and not self.is_paused:
                try:
                    if not self._take_head():
                        break
                except Rejected as error:
                    self._refuse(error)
        finally:
            self._is_advancing = False
        if self._state == HEAD and self.is_half_closed and not self.is_paused:
            self._close()

    def forget_head(self) -> None:
        """What the last one was found to be may not hold any more."""
        self._memo, self._memo_size = b"", 0

    def _take_head(self) -> bool:
        """One head, and the body if it is there; then hands both over. False: wants more bytes."""
        data = self._buffer
        memo = self._memo
        self.head = None
        if memo and data.startswith(memo):
            head = cast("RequestHead", self._memo_head)
            at = len(memo)
        else:
            end = data.find(b"\r\n\r\n")
            limit = self._shared.limits.max_header_bytes
            if end > limit or (end < 0 and len(data) > limit):
                raise Rejected(
                    431,
                    "headers_too_large",
                    f"the headers are larger than {limit} bytes",
                    close=True,
                )
            if end < 0:
                if data[:1] < b"!" or (b"\n" in data and b"\r\n" not in data):
                    return self._skip_blank(data)
                return False
            if data[0] < 33:
                return self._skip_blank(data)
            head = self._shared.parser.parse(data[:end])
            self._has_skipped = False
            at = end + 4
            self._memo, self._memo_head = data[:at], head
            self._memo_size = 0 if head.is_chunked else at + head.content_length
        self.head = head
        size = head.content_length
        if not head.is_chunked and len(data) - at >= size:  # mostly all comes at once
            self._buffer = data[at + size :]
            self._state = BUSY
            self.deadline = NEVER
            service = self._shared.service
            service.check(self, head)
            service.handle(self, head, data[at : at + size])
            return True
        self._shared.service.check(self, head)
        self._state = BODY
        self.deadline = time.monotonic() + self._shared.timeouts.body_s
        self._body, self._body_left = [], size
        self._decoder = ChunkDecoder(is_strict=True) if head.is_chunked else None
        self._buffer = b""
        self._shared.on_body(size)
        if head.expects_continue and len(data) == at:
            self.write(responses.CONTINUE)
        if len(data) > at:
            self._take_body(data[at:])
        return self._state == HEAD

    def _take_known(self, data: bytes) -> None:
        """One whole request with the same head as the last one. Hot path: what most are."""
        head = cast("RequestHead", self._memo_head)
        self.head = head
        self._state = BUSY
        self.deadline = NEVER
        service = self._shared.service
        try:
            service.check(self, head)
            service.handle(self, head, data[len(self._memo) :])
        except Rejected as error:
            self._refuse(error)

    def _skip_blank(self, data: bytes) -> bool:
        """One empty line may come before a request: some clients end their bodies with it."""
        if data == b"\r":
            return False
        is_second = self._has_skipped or data[2:3] in (b"\r", b"\n")
        if is_second or not data.startswith(b"\r\n"):
            raise Rejected(400, "invalid_http", "The request is not valid HTTP.", close=True)
        self._has_skipped = True
        self.forget_head()  # so that the next head is parsed, which ends this
        self._buffer = data[2:]
        return bool(self._buffer)

    def _take_body(self, data: bytes) -> None:
        head = cast("RequestHead", self.head)
        decoder = self._decoder
        if decoder is None:
            self._body.append(data[: self._body_left])
            rest = data[self._body_left :]
            self._body_left -= len(data)
            if self._body_left > 0:
                return
        else:
            limits = self._shared.limits
            try:
                pieces = decoder.feed(data)
            except ChunkError as error:
                raise Rejected(
                    400, "invalid_http", f"The body is not valid HTTP: {error}.", close=True
                ) from None
            self._body += pieces
            self._body_left += sum(map(len, pieces))  # counts up: there is no length to count from
            if self._body_left > head.max_body_bytes:
                raise too_large(head.max_body_bytes)
            if decoder.num_chunks > limits.max_body_chunks:
                raise Rejected(400, "too_many_chunks", "The body has too many chunks.", close=True)
            if not decoder.is_done:
                return
            rest = decoder.rest
        body, self._body, self._decoder = b"".join(self._body), [], None
        self._buffer = rest
        self._state = BUSY
        self.deadline = NEVER
        self._shared.service.handle(self, head, body)

    # -- ending

    def _refuse(self, error: Rejected) -> None:
        """Answers what went wrong while a request was read or handed over."""
        shared = self._shared
        head = self.head
        is_read = self._state == BUSY  # to its last byte: the connection can go on
        self._state = BUSY
        self.owner = None
        request_id = (head.request_id if head else "") or shared.service.new_request_id()
        keep_alive = is_read and not (error.close or self.wants_close)
        self.write(responses.refusal(error, request_id, head, keep_alive=keep_alive))
        shared.service.refused(self, error, request_id)
        if is_read:
            self.finish(keep_alive=keep_alive)
        else:
            self._linger()

    def _linger(self) -> None:
        """Closes our half, and throws away what still comes for a moment."""
        self._state = LINGER
        self._buffer, self._body = b"", []
        self.deadline = time.monotonic() + _LINGER_S
        self._shared.deadlines.watch(self)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _close(self) -> None:
        """Ends the connection when what is written has left."""
        self._state = CLOSED
        self.deadline = time.monotonic() + self._shared.timeouts.write_s
        self._transport.close()

    def _probe(self) -> None:
        """Finds out whether a client that sends no more is still there."""
        if not self.has_begun and self.head is not None and not self.head.is_http10:
            self.write(responses.CONTINUE)
        elif self.owner is not None and (harmless := self.owner.probe()):
            self.write(harmless)
        else:
            return
        self._num_probes = 0
        self._shared.loop.call_later(_PROBE_DELAYS_S[0], self._look_after_probe)

    def _look_after_probe(self) -> None:
        if self.owner is None or self._transport.is_closing():
            return
        if _is_reset(self._transport):
            self.abort()
            return
        self._num_probes += 1
        if self._num_probes < len(_PROBE_DELAYS_S):
            delay_s = _PROBE_DELAYS_S[self._num_probes]
            self._shared.loop.call_later(delay_s, self._look_after_probe)


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the kernel knows that the peer is gone: a socket that is not read has no event."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        state: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return state[0] == _TCP_CLOSE
