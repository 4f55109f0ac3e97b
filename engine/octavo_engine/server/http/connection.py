"""HTTP/1.1 on one connection: uvicorn's httptools protocol with bounds on headers and silence.

And a short way out for the chunks of streams."""

from __future__ import annotations

import re
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo_engine.server.http.errors import HttpError, error_body
from octavo_engine.server.http.exchange import LINE
from octavo_engine.server.http.tls import PEER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from octavo_engine.server.limits import RequestLimits

_HOST = re.compile(rb"[A-Za-z0-9.:_\-\[\]]*")
_CODES = {414: "url_too_long", 431: "headers_too_large", 505: "http_version"}
LINGER_S = 2.0  # for an answer to arrive before the reset that unread bytes cause
_PROBE_DELAYS_S = (0.02, 0.1, 0.5)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7  # of Linux' tcpi_state
_PROGRESS_BYTES = 32 * 2**10  # of unsent ones that a client has to take within the write timeout
_LOOKS_A_TIMEOUT = 8
_MOST_BETWEEN_LOOKS_S = 5.0
_DISCARD_UNSENT = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


def http_protocol(limits: RequestLimits) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn, with these limits built in."""

    class Protocol(BoundedProtocol):
        max_header_bytes = limits.max_header_bytes
        max_headers = limits.max_headers
        max_url_bytes = limits.max_url_bytes
        header_timeout_s = limits.header_timeout_s
        write_timeout_s = limits.write_timeout_s

    return Protocol


class Malformed(Exception):
    """Ends the parser's work on a connection that was refused already."""


class CycleLine:
    """A Line over uvicorn's own record of an answer."""

    __slots__ = ("_watchers", "cycle", "ignorable")

    def __init__(self, cycle: RequestResponseCycle, watchers: set[Callable[[], None]]) -> None:
        self.cycle = cycle
        self._watchers = watchers  # of the connection
        self.ignorable = b""

    @property
    def has_come(self) -> bool:
        return not self.cycle.more_body

    @property
    def is_open(self) -> bool:
        cycle = self.cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, payload: bytes) -> None:
        self.cycle.transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def watch(self, left: Callable[[], None]) -> None:
        if self.cycle.disconnected:
            left()
        else:
            self._watchers.add(left)

    def unwatch(self, left: Callable[[], None]) -> None:
        self._watchers.discard(left)

    def probe(self) -> bool:
        """Sends what the client ignores at this point of the answer; false if nothing is."""
        cycle = self.cycle
        if not cycle.response_started:
            if cycle.scope["http_version"] != "1.1":
                return False
            cycle.transport.write(_CONTINUE)
        elif self.is_open and self.ignorable:
            self.write(self.ignorable)
        else:
            return False
        return True


class BoundedProtocol(HttpToolsProtocol):
    """Until a request's headers are complete, its bytes and its time are counted."""

    max_header_bytes: int
    max_headers: int
    max_url_bytes: int
    header_timeout_s: float
    write_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._watchers: set[Callable[[], None]] = set()
        self._unanswered: deque[CycleLine] = deque()
        self._is_half_closed = False  # by the client
        self._is_lingering = False
        self._unsent: tuple[int, float] | None = None  # bytes that nobody adds to, and since when
        self._unsent_timer: asyncio.TimerHandle | None = None
        self._peer: Any = None  # the certificate that the client showed, as `ssl` reads it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._peer = transport.get_extra_info("peercert")
        self._arm(self.header_timeout_s)
        self._watch_unsent()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
        self._give_up()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = (self.transport.get_write_buffer_size(), self.loop.time())

    def resume_writing(self) -> None:
        self._unsent = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._in_headers:
            if self._header_bytes == 0 and self._header_timer is None:
                # the first byte of a later request on a kept connection
                self._arm(self.header_timeout_s)
            self._header_bytes += len(data)
        self._feed(data)
        if self._in_headers and self._header_bytes > self.max_header_bytes:
            self._refuse(431, f"the headers are larger than {self.max_header_bytes} bytes")

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes always
        """A client that has left looks the same as one that only has no more to send, until
        something is sent to it: the former's machine answers with a reset.

        NOTE: TLS has no half that could stay open; asyncio ends both.
        """
        if self.scheme == "https" or not self._unanswered or self.cycle.more_body:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self.cycle.keep_alive = False  # no request comes behind it
            self._probe(0)
        return True

    def on_headers_complete(self) -> None:
        self._disarm()
        self._check_head()
        self._in_headers = False
        if not self.flow.write_paused:
            self._unsent = None  # another answer may be added to it
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = _WhileBodyComes(self)  # type: ignore[assignment]  # all that a cycle calls
        line = CycleLine(cycle, self._watchers)
        self._unanswered.append(line)
        self.scope["extensions"] = {LINE: line, PEER: self._peer}  # type: ignore[dict-item]  # ours
        if self.parser.get_method() == b"CONNECT":  # the parser reads no request after it
            cycle.keep_alive = False

    def _check_head(self) -> None:
        if len(self.url) > self.max_url_bytes:
            self._refuse(414, f"the URL is longer than {self.max_url_bytes} bytes")
            raise Malformed
        if len(self.headers) > self.max_headers:
            self._refuse(431, f"there are more than {self.max_headers} headers")
            raise Malformed
        if self._header_bytes > self.max_header_bytes:  # or a body came in the same piece
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.max_header_bytes:
                self._refuse(431, f"the headers are larger than {self.max_header_bytes} bytes")
                raise Malformed
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0", "0.9"):
            self._refuse(505, "only HTTP/1.1 and HTTP/1.0 are supported")
            raise Malformed
        if problem := _problem(version, self.headers):
            self._refuse(400, problem)
            raise Malformed

    def on_message_complete(self) -> None:
        if self._stops_behind_head():
            return  # the body is still to come
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_complete()
        self.cycle.transport = self.transport
        if self.cycle.response_complete:
            self._disarm()

    def on_response_complete(self) -> None:
        cycle = self._unanswered.popleft().cycle
        if self._is_lingering:
            return
        super().on_response_complete()
        if cycle.more_body:  # nobody waits for the rest, so nobody else bounds its time
            self._arm(self.header_timeout_s)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP at all; answered like every other error."""
        self._refuse(400, "the request is not valid HTTP")

    def linger(self) -> None:
        """Ends the connection, but throws away what still comes for a moment: bytes that nobody has
        read would reset it, and take the answer from under the client."""
        if self._is_lingering or self.transport.is_closing():
            return
        self._is_lingering = True
        self._unset_keepalive_if_required()
        self._disarm()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(LINGER_S)

    def _feed(self, data: bytes) -> None:
        """As uvicorn does, but nothing is lost behind a head that asks for another protocol."""
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as stopped:
                if not self._stops_behind_head():
                    return
                data = data[stopped.args[0] :]
                self._read_on()
                continue
            except HttpParserError:
                self.send_400_response("")
            return

    def _stops_behind_head(self) -> bool:
        """Whether the parser takes a request for complete because it names another protocol, which
        nobody speaks here: RFC 9110 7.8 lets us answer as if it had not."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _read_on(self) -> None:
        """Another parser takes the body, and what comes behind it."""
        framing = [
            b"%b: %b\r\n" % field
            for field in self.headers
            if field[0] in (b"content-length", b"transfer-encoding")
        ]
        self.parser = HttpRequestParser(_BehindHead(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))

    def _refuse(self, status: int, message: str) -> None:
        if self._is_lingering or self.transport.is_closing():
            return
        in_body = not self._in_headers  # else it is a request behind all that are unanswered
        if in_body and self.cycle.response_complete:
            self.linger()
            return
        if len(self._unanswered) > in_body or (in_body and self.cycle.response_started):
            self.transport.close()  # another answer is on its way: nothing can be put between
            return
        code = _CODES.get(status, "invalid_http")
        body = error_body(HttpError(status, message, code=code))
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self._give_up()
        self.linger()

    def _give_up(self) -> None:
        """No answer can be written any more: not to the last request, nor to those before it."""
        for line in self._unanswered:
            line.cycle.disconnected = True
            line.cycle.message_event.set()
        self._unanswered.clear()
        for left in list(self._watchers):
            left()

    def _probe(self, number: int) -> None:
        """Finds out whether a client that sends no more is still there."""
        if not self._unanswered or self.transport.is_closing():
            return
        if number == 0:
            if not self._unanswered[0].probe():
                return
        elif _is_reset(self.transport):
            self.transport.abort()
            return
        if number < len(_PROBE_DELAYS_S):
            self.loop.call_later(_PROBE_DELAYS_S[number], self._probe, number + 1)

    def _watch_unsent(self) -> None:
        interval_s = min(self.write_timeout_s / _LOOKS_A_TIMEOUT, _MOST_BETWEEN_LOOKS_S)
        self._unsent_timer = self.loop.call_later(interval_s, self._check_unsent)

    def _check_unsent(self) -> None:
        """Ends a connection whose client does not take what was written: of an answer that waits
        for room, or that is over. Such a client would keep the connection, and the memory of what
        is unsent in this process and in the kernel, for as long as it likes."""
        now, size = self.loop.time(), self.transport.get_write_buffer_size()
        is_added_to = bool(self._unanswered) and not (
            self.flow.write_paused or self.transport.is_closing()
        )
        if not size or is_added_to:
            self._unsent = None
        elif self._unsent is None or size <= self._unsent[0] - _PROGRESS_BYTES:
            self._unsent = (size, now)
        elif now - self._unsent[1] >= self.write_timeout_s:
            self._reset()
            return
        self._watch_unsent()

    def _reset(self) -> None:
        """The kernel forgets what is unsent, too: else it keeps that until the client takes it."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with suppress(OSError):  # it is closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD_UNSENT)
        self.transport.abort()

    def _arm(self, timeout_s: float) -> None:
        self._header_timer = self.loop.call_later(timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        self.transport.close()


class _WhileBodyComes:
    """The transport of an answer that may be complete before its request is."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.linger


class _BehindHead:
    """Passes on what a parser finds behind a head that its connection knows already."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._is_behind = False
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self._is_behind:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_behind:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_behind:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_behind:
            self._protocol.on_headers_complete()
        self._is_behind = True


def _problem(version: str, headers: list[tuple[bytes, bytes]]) -> str:
    """Why a head is none of HTTP/1.0 or 1.1; empty if it is one."""
    if version == "0.9":
        return "the request line must end with HTTP/1.1 or HTTP/1.0"
    if version == "1.0" and any(name == b"transfer-encoding" for name, _ in headers):
        return "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1"
    hosts = [value for name, value in headers if name == b"host"]
    if (len(hosts) != 1 and (hosts or version != "1.0")) or not _HOST.fullmatch(b"".join(hosts)):
        return "the request needs one Host header, with a name or an address"
    return ""


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the kernel knows that the peer is gone: a socket that is not read says nothing. What
    is written to a Unix socket without a peer fails at once."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        state: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return state[0] == _TCP_CLOSE
