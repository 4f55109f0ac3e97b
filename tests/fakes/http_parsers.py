"""Other readers of HTTP/1.1: what each finds in the same bytes.

llhttp (of Node and of uvicorn, with which engines read), h11, and the one of aiohttp in Python.
Each ends at what it refuses.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import h11
import httptools
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParserPy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class FramedRequest(NamedTuple):
    method: str
    target: bytes
    body: bytes


class _Llhttp:
    def __init__(self) -> None:
        self.requests: list[FramedRequest] = []
        self._target, self._body = b"", b""
        self._parser = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._target, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        self.requests.append(FramedRequest(method, self._target, self._body))

    def read(self, data: bytes) -> list[FramedRequest]:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return self.requests
        return self.requests


def by_llhttp(data: bytes) -> list[FramedRequest]:
    return _Llhttp().read(data)


def by_h11(data: bytes) -> list[FramedRequest]:
    """As a server that answers each, so that the connection goes on."""
    found = []
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    connection.receive_data(b"")
    head, body = None, b""
    try:
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                found.append(FramedRequest(head.method.decode(), head.target, body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    break
                connection.start_next_cycle()
            elif isinstance(event, h11.ConnectionClosed):
                break
    except h11.RemoteProtocolError:
        return found
    return found


class _Protocol:
    """What aiohttp's bodies need of a connection."""

    _reading_paused = False

    def pause_reading(self) -> None: ...

    def resume_reading(self, **_: object) -> None: ...


def by_aiohttp(data: bytes) -> list[FramedRequest]:
    protocol: Any = _Protocol()
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParserPy(protocol, loop, limit=2**20, auto_decompress=False)
        messages: list[Any] = []
        try:
            messages, _, _ = parser.feed_data(data)
        except HttpProcessingError:
            # It reports none where one of them is wrong: what comes before is read again, bytewise.
            messages = _bytewise(HttpRequestParserPy(
                protocol, loop, limit=2**20, auto_decompress=False
            ), data)  # fmt: skip
        found = []
        for message, payload in messages:
            if not payload.is_eof() or payload.exception() is not None:
                break
            target = message.path.encode("utf-8", "surrogateescape")
            found.append(FramedRequest(message.method, target, payload.read_nowait()))
        return found
    finally:
        loop.close()


def _bytewise(parser: Any, data: bytes) -> list[Any]:
    messages: list[Any] = []
    try:
        for at in range(len(data)):
            messages += parser.feed_data(data[at : at + 1])[0]
    except HttpProcessingError:
        return messages
    return messages


PARSERS: Mapping[str, Callable[[bytes], list[FramedRequest]]] = {
    "llhttp": by_llhttp,
    "h11": by_h11,
    "aiohttp": by_aiohttp,
}
