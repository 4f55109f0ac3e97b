"""One HTTP/1.1 response, read within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httptools

if TYPE_CHECKING:
    import asyncio

    from octavo_engine.core.media.budget import ByteBudget

MAX_HEAD_BYTES = 64 << 10
_CHUNK_BYTES = 64 << 10


class BadResponse(ValueError):
    """What is wrong with it, for the one who named its address."""


class PictureResponse:
    """Status and headers, then the body as far as it is wanted."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._is_body = False
        self._is_whole = False
        self._chunks: list[bytes] = []

    async def read_head(self) -> None:
        """Raises BadResponse, OSError."""
        num_bytes = 0
        while not self._is_body:
            num_bytes += await self._feed()
            if num_bytes > MAX_HEAD_BYTES and not self._is_body:
                raise BadResponse(f"the headers have more than {MAX_HEAD_BYTES} bytes")

    async def read_body(self, budget: ByteBudget, param: str) -> bytes:
        """Raises BadResponse, OSError, and RequestError once it is larger than the budget."""
        length = self.headers.get(b"content-length", b"")
        if length.isdigit():
            budget.check(int(length), param)
        body: list[bytes] = []
        while True:
            for chunk in self._chunks:
                budget.take(len(chunk), param)
                body.append(chunk)
            self._chunks.clear()
            if self._is_whole:
                return b"".join(body)
            if await self._feed() == 0:
                if length or b"transfer-encoding" in self.headers:
                    raise BadResponse("the connection ended in the middle of the picture")
                return b"".join(body)

    async def _feed(self) -> int:
        data = await self._reader.read(_CHUNK_BYTES)
        if not data:
            if not self._is_body:
                raise BadResponse("the connection ended before the headers were complete")
            return 0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise BadResponse("the response is not HTTP") from None
        return len(data)

    # ── httptools ──

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value.strip()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._is_body = self.status >= 200
        if not self._is_body:  # 1xx: the response itself comes after it
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = self._is_body
