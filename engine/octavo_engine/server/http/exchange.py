"""One HTTP request and its answer: bounded bodies, replies, streams, clients that leave."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

from octavo_engine.errors import DeadlineExceeded, InvalidRequest
from octavo_engine.protocol.endpoints import (
    REQUEST_ID_HEADER,
    RESUME_HEADER,
    STREAM_HEADER,
    TIMEOUT_HEADER,
    UNKNOWN_FIELDS_HEADER,
)
from octavo_engine.protocol.resume import MAX_RESUME_BYTES
from octavo_engine.server.http import strict_json
from octavo_engine.server.http.disconnect import CancelOnDisconnect, ClientGone, ClientLine
from octavo_engine.server.http.error_shapes import shape_of
from octavo_engine.server.http.errors import HttpError, error_headers
from octavo_engine.server.http.json_size import check_size, is_quick
from octavo_engine.server.http.resume_frame import read_frame
from octavo_engine.server.http.tls import PEER
from octavo_engine.server.http.unknown_fields import note_unknown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

    from starlette.types import Message, Receive, Scope, Send

    from octavo_engine.errors import RequestError
    from octavo_engine.protocol.resume import Resume
    from octavo_engine.server.limits import RequestLimits

T = TypeVar("T")

LINE = "octavo.line"  # the extension under which a server offers its Line

Header = tuple[bytes, bytes]

JSON: Header = (b"content-type", b"application/json")
_SSE_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that buffer would hold tokens back
)
_SSE_COMMENT = b":\n\n"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


IN_BACKGROUND = "octavo.background"  # in the scope of a request that the server makes itself


class Exchange:
    """Raw ASGI underneath; nothing here knows what a request is about."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: RequestLimits) -> None:
        self.scope = scope
        self.limits = limits
        self.status = 0  # once the answer has begun
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = self._request_id()
        self.resume: Resume | None = None  # what came before the body; known once that was read
        self.fields: Any = None  # the body as JSON; known once that was read
        self.num_body_bytes = 0  # that were read into memory
        self.group = ""  # the request that this one is a part of, where one makes several
        self.notes: dict[bytes, bytes] = {}  # headers of the answer that say how it was made
        # The last bytes of a stream that fails; None: as its path's errors are shaped.
        self.last_words: Callable[[RequestError], bytes] | None = None
        self._receive = receive
        self._send = send
        self.line: ClientLine | None = scope.get("extensions", {}).get(LINE)
        self._began_at = _now()
        self._write_began_at = 0.0
        self._more_body = True

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def peer_certificate(self) -> Mapping[str, Any] | None:
        """Of the client, checked; None where it showed none, or the connection is plain."""
        found: Mapping[str, Any] | None = self.scope.get("extensions", {}).get(PEER)
        return found or None

    @property
    def is_background(self) -> bool:
        """No client waits for its answer: it runs on spare capacity. No client can say so."""
        return bool(self.scope.get(IN_BACKGROUND))

    @property
    def wants_tokens(self) -> bool:
        """A router must know the tokens of a stream to go on with it elsewhere."""
        return self.header(STREAM_HEADER.encode()) == "tokens"

    def time_left_s(self, limit_s: float | None) -> float | None:
        """Of the client's own deadline and the server's, the nearer one; None without either.

        Raises InvalidRequest for a header that makes no sense, DeadlineExceeded when it is past.
        """
        given = self.header(TIMEOUT_HEADER.encode())
        if given:
            if not (
                given.isascii() and given.isdigit() and 0 < len(given) <= 12 and int(given) > 0
            ):
                raise InvalidRequest(
                    f"{TIMEOUT_HEADER} must be a whole number of milliseconds above 0",
                    param=TIMEOUT_HEADER,
                    code="invalid_header",
                )
            wanted_s = int(given) / 1000
            limit_s = wanted_s if limit_s is None else min(limit_s, wanted_s)
        if limit_s is None:
            return None
        left_s = limit_s - (_now() - self._began_at)
        if left_s <= 0:
            raise DeadlineExceeded(f"The request was not done within {limit_s:g} s.")
        return left_s

    def again(
        self, body: bytes, *, send: Send | None = None, shares_client: bool = True
    ) -> Exchange:
        """The same request with another body, whose answer goes the same way or to `send`.

        With `shares_client` false it never sees its client leave: its maker watches for both.
        """
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            if not shares_client:
                await asyncio.Event().wait()
            return await self._receive()

        other = Exchange(self.scope, receive, send or self._send, self.limits)
        other.request_id = self.request_id
        other.headers.pop(b"content-length", None)
        other._began_at = self._began_at
        if send is not None or not shares_client:
            other.line = None
        return other

    @property
    def _resumes(self) -> bool:
        return self.header(RESUME_HEADER.encode()) == "1"

    @property
    def started(self) -> bool:
        return self.status != 0

    # ── reading ──

    async def json(self, type_: type[T]) -> T:
        """The body as `type_`. Raises RequestError, 400, 408, 413 or 415."""
        media_type = self.header(b"content-type").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise HttpError(
                415,
                f"content-type must be application/json; got {media_type or 'none'}",
                code="unsupported_media_type",
            )
        if self.header(b"content-encoding") not in ("", "identity"):
            raise HttpError(415, "a compressed body is not accepted", code="unsupported_media_type")
        body = await self.body()
        if self._resumes:
            self.resume, body = read_frame(body)
            if len(body) > self.limits.max_body_bytes:
                raise self._too_large()

        def read() -> T:
            self.fields = self._parsed(body)
            value = strict_json.convert(self.fields, type_)
            unknown = note_unknown(self.fields, type_, is_strict=self.limits.strict_fields)
            if unknown:
                self.notes[UNKNOWN_FIELDS_HEADER.encode()] = unknown.encode()
            return value

        return read() if is_quick(body) else await asyncio.to_thread(read)

    async def shape(self, body: bytes) -> Any:
        """Any body as dicts and lists. Raises RequestError (400)."""
        return self._parsed(body) if is_quick(body) else await asyncio.to_thread(self._parsed, body)

    def _parsed(self, body: bytes) -> Any:
        limits = self.limits
        check_size(body, max_objects=limits.max_json_objects, max_values=limits.max_json_values)
        return strict_json.parse(body, max_depth=limits.max_json_depth)

    async def body(self) -> bytes:
        # A resumed request was within the limit before the router put a frame before it.
        limit = self.limits.max_body_bytes + (MAX_RESUME_BYTES if self._resumes else 0)
        declared = self.header(b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise self._too_large()
        if self.line is not None and self.line.has_come:  # the rule: nothing to wait for
            return await self._read(limit)
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                return await self._read(limit)
        except TimeoutError:
            raise self._too_slow() from None

    async def _read(self, limit: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while self._more_body:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._more_body = message.get("more_body", False)
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise self._too_large()
            self.num_body_bytes = size
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def chunks(self, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """A body too large to be held, as it comes. Raises 413, and 408 where nothing comes."""
        declared = self.header(b"content-length")
        size = int(declared) if declared.isdigit() else 0
        if size > max_bytes:
            raise self._too_large(max_bytes)
        size = 0
        while self._more_body:
            try:
                async with asyncio.timeout(self.limits.body_timeout_s):
                    message = await self._receive()
            except TimeoutError:
                raise self._too_slow() from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._more_body = message.get("more_body", False)
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > max_bytes:
                raise self._too_large(max_bytes)
            yield chunk

    def _too_slow(self) -> HttpError:
        return HttpError(
            408,
            f"the body did not arrive within {self.limits.body_timeout_s:g} s",
            code="body_timeout",
            headers=((b"connection", b"close"),),
        )

    def _too_large(self, max_bytes: int | None = None) -> HttpError:
        return HttpError(
            413,
            f"the body is larger than {max_bytes or self.limits.max_body_bytes} bytes",
            code="body_too_large",
            headers=((b"connection", b"close"),),
        )

    # ── answering ──

    async def reply(
        self, payload: bytes, *, status: int = 200, headers: list[Header] | None = None
    ) -> None:
        """The whole answer at once. A JSON body, unless the headers say otherwise."""
        headers = [JSON] if headers is None else headers
        await self._begin(status, [*headers, (b"content-length", str(len(payload)).encode())])
        await self._send({"type": "http.response.body", "body": payload})

    async def refuse(self, error: RequestError) -> None:
        """The error object with its status; inside a stream an event, then the end."""
        shape = shape_of(self.scope)
        if self.started:
            last_words = self.last_words or shape.last_words
            await self.close(last_words(error))
            return
        payload = shape.body(error, self.request_id)
        headers = [JSON, (b"content-length", str(len(payload)).encode()), *error_headers(error)]
        await self._begin(error.status, headers)
        await self._send({"type": "http.response.body", "body": payload})

    async def open_stream(self, headers: Iterable[Header] = _SSE_HEADERS) -> None:
        if self.line is not None and headers is _SSE_HEADERS:
            self.line.ignorable = _SSE_COMMENT
        await self._begin(200, list(headers))

    async def write(self, payload: bytes) -> None:
        """Hot path: once per output. Waits while the client's buffers are full."""
        self._write_began_at = _now()
        await self._send({"type": "http.response.body", "body": payload, "more_body": True})
        self._write_began_at = 0.0

    def takes_chunks(self) -> bool:
        """Whether `write_now` may be called: a stream is open, and its client reads it."""
        return self.line is not None and self.line.is_open

    def write_now(self, payload: bytes) -> None:
        """As `write`, without waiting for anything."""
        if payload:
            assert self.line is not None
            self.line.write(payload)

    async def close(self, payload: bytes = b"") -> None:
        """The last bytes of a stream."""
        await self._send({"type": "http.response.body", "body": payload})

    async def _begin(self, status: int, headers: list[Header]) -> None:
        self.status = status
        request_id = self.request_id.encode()
        headers.append((REQUEST_ID_HEADER.encode(), request_id))
        headers += [(name, request_id) for name in shape_of(self.scope).also_request_id]
        headers += self.notes.items()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    # ── the client's presence ──

    def while_present(self) -> CancelOnDisconnect:
        """`async with`: what is inside is cancelled, with ClientGone, once the client is gone."""
        return CancelOnDisconnect(self)

    @property
    def has_stopped_reading(self) -> bool:
        """Whether what was written last waits too long for room in the client's buffers."""
        began_at = self._write_began_at
        return bool(began_at) and _now() - began_at >= self.limits.write_timeout_s

    async def gone(self) -> None:
        """Returns when the client has left or has read nothing for too long."""
        while not self.has_stopped_reading:
            try:
                async with asyncio.timeout(self.limits.write_timeout_s):
                    while (await self._receive())["type"] != "http.disconnect":
                        pass
                    return
            except TimeoutError:
                pass  # time to look

    def _request_id(self) -> str:
        given = self.header(REQUEST_ID_HEADER.encode())
        return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def _now() -> float:
    return asyncio.get_running_loop().time()
