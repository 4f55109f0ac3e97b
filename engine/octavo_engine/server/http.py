"""HTTP/1.1 on one connection: uvicorn's httptools protocol with bounds on headers and silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo_engine.server.http_errors import HttpError, error_body

if TYPE_CHECKING:
    import asyncio

    from octavo_engine.server.limits import Limits


def http_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn, with these limits built in."""

    class Protocol(BoundedProtocol):
        max_header_bytes = limits.max_header_bytes
        header_timeout_s = limits.header_timeout_s

    return Protocol


class BoundedProtocol(HttpToolsProtocol):
    """Until a request's headers are complete, its bytes and its time are counted."""

    max_header_bytes: int
    header_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

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
        super().on_headers_complete()

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
        code = "headers_too_large" if status == 431 else "invalid_http"
        body = error_body(HttpError(status, message, code=code))
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _arm(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        self.transport.close()
