"""A small HTTP/1.1 client for the commands: one request at a time, events with arrival times."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httptools

from octavo_engine.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))
DONE = b"[DONE]"


class ServerError(OctavoError):
    """The server cannot be reached, or answered with an error."""


class Unanswered(ServerError):
    """The connection ended before a byte of the answer: on a kept one, a reason to try anew."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, as its URL says."""

    scheme: str
    host: str
    port: int
    path: str  # before /v1; no slash at its end

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        try:
            parts = urlsplit(url if "://" in url else "http://" + url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:  # a port above 65535, half an IPv6 address
            raise _no_url(url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _no_url(url)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK


@dataclass(slots=True)
class ServerReply:
    """What came back, and when."""

    sent_at: float = 0.0
    status: int = 0
    content_type: str = ""
    body: list[bytes] = field(default_factory=list)  # unless it is a stream of events

    @property
    def is_stream(self) -> bool:
        return self.content_type == "text/event-stream"

    def json(self) -> Any:
        """Raises ServerError where the server speaks of something else."""
        try:
            return json.loads(b"".join(self.body))
        except (ValueError, RecursionError):
            raise ServerError(self.error) from None

    @property
    def error(self) -> str:
        """One sentence on an answer that cannot be used; pages for browsers are not shown."""
        text = b"".join(self.body).decode(errors="replace").strip()
        try:
            return f"the server answered {self.status}: {json.loads(text)['error']['message']}"
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        if self.content_type == "text/plain" and 0 < len(text) <= 200 and text.isprintable():
            return f"the server answered {self.status}: {text}"
        kind = self.content_type if text else "nothing"
        return (
            f"the server answered {self.status} with {kind or 'something'}, not with JSON of the "
            "OpenAI API; check the URL"
        )


def _no_url(url: str) -> ServerError:
    return ServerError(f"{url} is not the URL of a server; expected http://HOST:PORT")


class HttpConnection(asyncio.Protocol):
    """One kept connection. Opened by `connect`; used by one caller at a time."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._reply = ServerReply()
        self._on_event: Callable[[bytes, float], None] | None = None
        self._tail = b""
        self._now = 0.0
        self._has_begun = False  # with the answer under way
        self.is_open = False

    @classmethod
    async def connect(cls, address: ServerAddress) -> HttpConnection:
        """Raises ServerError."""
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: cls(address), address.host, address.port,
                ssl=True if address.scheme == "https" else None,
            )  # fmt: skip
        except OSError as error:
            reason = error.strerror or str(error)
            raise ServerError(
                f"no server answers at {address.scheme}://{address.host}:{address.port}: {reason}"
            ) from None
        return connection

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        on_event: Callable[[bytes, float], None] | None = None,
    ) -> ServerReply:
        """The reply once it is whole; each event of a stream goes to `on_event` as it arrives."""
        assert self._transport is not None and self._done is None  # connected, and one at a time
        lines = [
            f"{method} {self._address.path}{path} HTTP/1.1",
            f"host: {self._address.host}:{self._address.port}",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        if body:
            lines.append("content-type: application/json")
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._tail, self._on_event = ServerReply(), b"", on_event
        self._has_begun = False
        self._done = asyncio.get_running_loop().create_future()
        self._reply.sent_at = time.perf_counter()
        self._transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        try:
            await self._done
        except BaseException:
            self.close()  # half an answer is left on it
            raise
        finally:
            self._done = None
        return self._reply

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ── asyncio.Protocol ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # of a stream socket
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()  # before anything is parsed
        self._has_begun = True
        if self._done is None or self._done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ServerError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        kind = ServerError if self._has_begun else Unanswered
        self._fail(kind("the server closed the connection before it had answered"))

    # ── httptools ──

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._reply.content_type = value.partition(b";")[0].strip().lower().decode("latin-1")
        elif name.lower() == b"connection" and value.lower() == b"close":
            self.is_open = False

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._reply.is_stream or self._on_event is None:
            self._reply.body.append(body)
            return
        *events, self._tail = (self._tail + body).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._on_event(line[5:].strip(), self._now)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: ServerError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


async def get_json(
    address: ServerAddress, path: str, headers: Mapping[str, str] | None = None
) -> Any:
    """Raises ServerError for whatever is not 200."""
    connection = await HttpConnection.connect(address)
    try:
        reply = await connection.request("GET", path, headers=headers)
    finally:
        connection.close()
    if reply.status != 200:
        raise ServerError(reply.error)
    return reply.json()
