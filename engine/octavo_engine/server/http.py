"""HTTP/1.1 on one connection: uvicorn's httptools protocol with bounds on headers and silence.

And a short way out for the chunks of streams."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo_engine.server.exchange import LINE
from octavo_engine.server.http_errors import HttpError, error_body

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from octavo_engine.server.limits import Limits

_HOST = re.compile(rb"[A-Za-z0-9.:_\-\[\]]*")
_CODES = {414: "url_too_long", 431: "headers_too_large"}


def http_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn, with these limits built in."""

    class Protocol(BoundedProtocol):
        max_header_bytes = limits.max_header_bytes
        max_headers = limits.max_headers
        max_url_bytes = limits.max_url_bytes
        header_timeout_s = limits.header_timeout_s

    return Protocol


class Malformed(Exception):
    """Ends the parser's work on a connection that was refused already."""


class CycleLine:
    """A Line over uvicorn's own record of an answer."""

    __slots__ = ("_cycle", "_watchers")

    def __init__(self, cycle: RequestResponseCycle, watchers: set[Callable[[], None]]) -> None:
        self._cycle = cycle
        self._watchers = watchers  # of the connection

    @property
    def has_come(self) -> bool:
        return not self._cycle.more_body

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, payload: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def watch(self, left: Callable[[], None]) -> None:
        if self._cycle.disconnected:
            left()
        else:
            self._watchers.add(left)

    def unwatch(self, left: Callable[[], None]) -> None:
        self._watchers.discard(left)


class BoundedProtocol(HttpToolsProtocol):
    """Until a request's headers are complete, its bytes and its time are counted."""

    max_header_bytes: int
    max_headers: int
    max_url_bytes: int
    header_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._watchers: set[Callable[[], None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        for left in list(self._watchers):
            left()

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            if self._header_bytes == 0 and self._header_timer is None:
                self._arm()  # the first byte of a later request on a kept connection
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > self.max_header_bytes:
            self._refuse(431, f"the headers are larger than {self.max_header_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._disarm()
        self._check_head()
        super().on_headers_complete()
        self.scope["extensions"] = {LINE: CycleLine(self.cycle, self._watchers)}  # type: ignore[dict-item]  # ours
        if self.parser.should_upgrade():  # the parser will read no further request after it
            self.cycle.keep_alive = False

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
        hosts = [value for name, value in self.headers if name == b"host"]
        is_old = self.parser.get_http_version() == "1.0"
        if (len(hosts) != 1 and not (is_old and not hosts)) or not _HOST.fullmatch(b"".join(hosts)):
            self._refuse(400, "the request needs one Host header, with a name or an address")
            raise Malformed

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._header_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP at all; answered like every other error."""
        self._refuse(400, "the request is not valid HTTP")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self.pipeline or (self.cycle is not None and self._is_answering()):
            self.transport.close()  # another answer is on its way: nothing can be put between
            return
        code = _CODES.get(status, "invalid_http")
        body = error_body(HttpError(status, message, code=code))
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle.response_started and not self.cycle.response_complete

    def _arm(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        self.transport.close()
