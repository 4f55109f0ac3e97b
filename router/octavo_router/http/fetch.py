"""A small HTTP/1.1 client for what the router asks on its own behalf: streams, polls, watches.

One connection, one exchange at a time, bodies collected or handed to a sink as they arrive. It is
a protocol, not a pair of streams: a frame that arrives costs no task switch, so a hundred quiet
engines cost nothing. Requests of clients do not pass through here.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import httptools

from octavo_router.errors import Unreachable

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from typing import Self

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 2**20  # a list of some ten thousand pods
KEEPALIVE = (10, 5, 3)  # seconds idle, seconds between probes, probes: a vanished host in 25 s


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """Where to connect and as whom to greet."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    server_name: str = ""  # what the certificate must say and Host carries; empty: the host

    @property
    def authority(self) -> str:
        name = self.server_name or self.host
        return f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"


@dataclass(slots=True)
class FetchResponse:
    """A head, and the body unless a sink takes it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # lower case; the last of equal names
    body: bytes = b""
    is_stream: bool = False


class Connection(asyncio.Protocol):
    """Use as `async with await Connection.open(target)`. Any failure is an `Unreachable`."""

    def __init__(self, target: FetchTarget) -> None:
        self.target = target
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None
        self._lost = False

    @classmethod
    async def open(cls, target: FetchTarget, *, timeout_s: float = 1.0) -> Self:
        loop = asyncio.get_running_loop()
        server_name = (target.server_name or target.host) if target.tls else None
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(
                    lambda: cls(target),
                    target.host,
                    target.port,
                    ssl=target.tls,
                    server_hostname=server_name,
                )
        except TimeoutError:
            raise Unreachable(f"no connection within {timeout_s:g} s") from None
        except OSError as error:  # TLS errors are OSErrors too
            raise Unreachable(_reason(error), is_refused=_is_refused(error)) from error
        return protocol

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Another request may be sent here."""
        return not self._lost and self._transport is not None and self._exchange is None

    async def get(
        self,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> FetchResponse:
        """The whole answer, whatever its status."""
        exchange = self._begin(path, headers, sink=None, max_body_bytes=max_body_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                await exchange.done
        except TimeoutError:
            raise Unreachable(f"no answer within {timeout_s:g} s") from None
        finally:
            if not exchange.is_over:
                self.close()
        return exchange.response

    async def stream(
        self,
        path: str,
        sink: Callable[[bytes], None],
        *,
        content_type: str,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> FetchResponse:
        """The head, once it is there. A 200's body goes to `sink`; await `ended()` for its end.

        `sink` may raise an `Unreachable` to end the stream. Any other status or content type is
        no stream: `is_stream` is false, and the body comes whole.
        """
        exchange = self._begin(path, headers, sink=sink, max_body_bytes=MAX_BODY_BYTES)
        exchange.content_type = content_type
        try:
            async with asyncio.timeout(timeout_s):
                await exchange.head
                if not exchange.response.is_stream:
                    await exchange.done
        except TimeoutError:
            raise Unreachable(f"no answer within {timeout_s:g} s") from None
        finally:
            if not (exchange.response.is_stream or exchange.is_over):
                self.close()
        return exchange.response

    async def ended(self) -> None:
        """Returns when the stream's body is complete; raises if it broke."""
        if self._exchange is not None:
            await self._exchange.done

    def close(self) -> None:
        self._lost = True
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Unreachable) -> None:
        """Ends the exchange for a reason of the caller's, such as silence."""
        if self._exchange is not None:
            self._exchange.fail(error)
        self.close()

    def _begin(
        self,
        path: str,
        headers: Mapping[str, str] | None,
        *,
        sink: Callable[[bytes], None] | None,
        max_body_bytes: int,
    ) -> _Exchange:
        if self._lost or self._transport is None:
            raise Unreachable("the connection is closed")
        assert self._exchange is None, "one exchange at a time"
        self._exchange = _Exchange(self, sink, max_body_bytes)
        lines = [f"GET {path} HTTP/1.1", f"host: {self.target.authority}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return self._exchange

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()  # bytes without a request
            return
        self._exchange.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._exchange is not None:
            self._exchange.lost(exc)

    # -- for the exchange

    def release(self, *, keep: bool) -> None:
        self._exchange = None
        if not keep:
            self.close()


class _Exchange:
    """One request's answer as httptools reads it."""

    def __init__(
        self, connection: Connection, sink: Callable[[bytes], None] | None, max_body_bytes: int
    ) -> None:
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.response = FetchResponse()
        self.content_type = ""  # of a body that goes to the sink
        self._connection = connection
        self._sink = sink
        self._room = max_body_bytes
        self._head_bytes = 0
        self._chunks: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_over(self) -> bool:
        return self.done.done() and not self.done.cancelled()

    def feed(self, data: bytes) -> None:
        if self.done.done():
            return
        if not self.head.done():
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            self.fail(Unreachable("the router failed to process the response"))
            raise  # our own mistake: the loop's handler reports it
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(Unreachable(f"the answer is not HTTP: {error}"))
        else:
            # Looked at after the parser has: a large body may follow a small head in one piece.
            if not self.head.done() and self._head_bytes > MAX_HEAD_BYTES:
                self.fail(Unreachable(f"the answer's head exceeds {MAX_HEAD_BYTES} bytes"))

    def lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        if exc is None and self._ends_with_connection():
            self._complete(keep=False)
            return
        self.fail(Unreachable(_reason(exc) if exc else "the connection was closed"))

    def fail(self, error: Unreachable) -> None:
        for future in (self.head, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # a stream's head may fail with nobody waiting for its end
        self._connection.close()

    def _ends_with_connection(self) -> bool:
        headers = self.response.headers
        return self.head.done() and not {"content-length", "transfer-encoding"} & headers.keys()

    def _complete(self, *, keep: bool) -> None:
        self.response.body = b"".join(self._chunks)
        for future in (self.head, self.done):
            if not future.done():
                future.set_result(None)
        self._connection.release(keep=keep)

    # -- called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()
        if self.response.status < 200:  # 100 Continue and the like: the answer follows
            self.response.headers.clear()
            return
        content_type = (
            self.response.headers.get("content-type", "").partition(";")[0].strip().lower()
        )
        if self._sink is None or self.response.status != 200 or content_type != self.content_type:
            self._sink = None
        self.response.is_stream = self._sink is not None
        if not self.head.done():
            self.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        if self.done.done():
            return
        if self._sink is not None:
            try:
                self._sink(body)
            except Unreachable as error:
                self.fail(error)
            return
        self._room -= len(body)
        if self._room < 0:
            self.fail(Unreachable("the answer is larger than it may be"))
            return
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        if not self.done.done() and self.response.status >= 200:
            self._complete(keep=self._parser.should_keep_alive())


def _keep_alive(sock: socket.socket | None) -> None:
    """A host that vanished sends no FIN; without probes a quiet connection to it lives for ever."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    idle, interval, count = KEEPALIVE
    with suppress(OSError, AttributeError):  # a platform without the option does without
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)


def _is_refused(error: OSError) -> bool:
    """Nobody listens there: the process is gone, the host is not."""
    if isinstance(error, ConnectionRefusedError):
        return True
    # asyncio joins the failures of several addresses into one OSError's text
    return "Connect call failed" in str(error) and "111" in str(error)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
