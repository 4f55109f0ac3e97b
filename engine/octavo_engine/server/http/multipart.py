"""multipart/form-data read as it comes, so that an upload never lies in memory. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HEAD_BYTES = 8192  # of one part
MAX_BOUNDARY_CHARS = 70  # RFC 2046
_BOUNDARY = re.compile(r'(?:^|;)\s*boundary=(?:"([^"]*)"|([^\s;"]+))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartBegan:
    """Its bytes follow, up to the next part's beginning or the form's end."""

    name: str
    filename: str | None  # None: a plain field


def check_form(content_type: str) -> None:
    """Raises HttpError (415) where the body is no form."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise HttpError(
            415,
            f"content-type must be multipart/form-data; got {media_type or 'none'}",
            code="unsupported_media_type",
        )


def boundary_of(content_type: str) -> bytes:
    """Between the parts of a form. Raises HttpError (415), InvalidRequest."""
    check_form(content_type)
    found = _BOUNDARY.search(content_type.partition(";")[2])
    boundary = (found[1] or found[2] or "") if found else ""
    if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS or not boundary.isascii():
        raise InvalidRequest("content-type has no boundary that multipart/form-data could have")
    return boundary.encode()


class FormReader:
    """Feed it the body; it reports what begins, and gives each part's bytes."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter has no line before it; with this one it looks like the others.
        self._buffer = bytearray(b"\r\n")
        self._read = self._before
        self.is_whole = False

    def feed(self, data: bytes) -> Iterator[PartBegan | bytes]:
        """Raises InvalidRequest for what is no form."""
        self._buffer += data
        while (step := self._read()) is not None:
            yield from step

    # Each of these takes what it can from the buffer and returns what it means; None: more bytes.

    def _before(self) -> list[PartBegan | bytes] | None:
        at = self._buffer.find(self._delimiter)
        if at < 0:
            del self._buffer[: -len(self._delimiter)]  # a preamble; no client writes one
            return None
        return self._pass(at)

    def _after_delimiter(self) -> list[PartBegan | bytes] | None:
        if len(self._buffer) < 2:
            return None
        mark = bytes(self._buffer[:2])
        if mark == b"--":
            self.is_whole, self._read = True, self._after
        elif mark == b"\r\n":
            self._read = self._head
        else:
            raise _malformed("there is something behind a boundary")
        return []

    def _head(self) -> list[PartBegan | bytes] | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_HEAD_BYTES or (end < 0 and len(self._buffer) > MAX_HEAD_BYTES):
            raise _malformed(f"the headers of a part are larger than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            return None
        part = _part(self._buffer[:end].decode("utf-8", "replace"))
        del self._buffer[: end + 4]
        self._read = self._content
        return [part]

    def _content(self) -> list[PartBegan | bytes] | None:
        at = self._buffer.find(self._delimiter)
        if at >= 0:
            content = bytes(self._buffer[:at])
            self._pass(at)
            return [content] if content else []
        ready = len(self._buffer) - len(self._delimiter)
        if ready <= 0:
            return None
        content = bytes(self._buffer[:ready])
        del self._buffer[:ready]
        return [content]

    def _after(self) -> None:
        self._buffer.clear()  # an epilogue

    def _pass(self, at: int) -> list[PartBegan | bytes]:
        del self._buffer[: at + len(self._delimiter)]
        self._read = self._after_delimiter
        return []


def _part(head: str) -> PartBegan:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            given = {found[1].lower(): _unquoted(found[2]) for found in _PARAMETER.finditer(value)}
            if "name" in given:
                return PartBegan(given["name"], given.get("filename"))
    raise _malformed("a part has no name")


def _unquoted(text: str) -> str:
    """As browsers and their like quote: only these three."""
    for quoted, plain in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        text = text.replace(quoted, plain)
    return re.sub(r"\\(.)", r"\1", text)


def _malformed(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {why}")
