"""Parsing the head of an upstream's answer: where its body ends, and which fields go on."""

from __future__ import annotations

from typing import Final

from octavo_router.http.fields import CONTROLS, TOKEN, list_items

_MAX_KNOWN_LINES: Final = 512
_MAX_KNOWN_HEADS: Final = 64
_MAX_KNOWN_BYTES: Final = 256

FORWARD, DROP, FRAMING = 0, 1, 2
_FRAMING: Final = frozenset(
    (b"content-length", b"transfer-encoding", b"connection", b"content-type", b"retry-after")
)
_DROPPED: Final = frozenset(
    (
        b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer", b"upgrade",
        b"x-request-id", b"x-served-by", b"alt-svc",
    )
)  # fmt: skip


class ResponseError(ValueError):
    """What an upstream sent is no answer; says why."""


class ResponseHead:
    """One parsed head of an answer. Never changed: answers with the same bytes share it."""

    __slots__ = (
        "content_length", "content_type", "forward", "is_chunked", "is_event_stream", "is_json",
        "keep_alive", "reason", "retry_after", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.reason = b""
        self.keep_alive = True
        self.content_length: int | None = None  # None and not chunked: until the connection ends
        self.is_chunked = False
        self.content_type = b""
        self.is_event_stream = False
        self.is_json = False
        self.retry_after = b""
        self.forward = b""  # the lines for the client, each with its CRLF


class ResponseHeadParser:
    """Parses heads of answers, and remembers those and the lines that it saw.

    The answers of one second mostly differ in their length alone, if at all.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, ResponseHead] = {}  # by their bytes
        self._lines: dict[bytes, tuple[int, bytes, bytes]] = {}

    def parse(self, data: bytes) -> ResponseHead:
        """`data` is all before the empty line. Raises ResponseError."""
        head = self.known.get(data)
        if head is None:
            head = self._parse(data)
            if len(self.known) >= _MAX_KNOWN_HEADS:
                self.known.clear()
            self.known[data] = head
        return head

    def _parse(self, data: bytes) -> ResponseHead:
        lines = data.split(b"\r\n")
        num_breaks = len(lines) - 1
        if data.count(b"\n") != num_breaks or data.count(b"\r") != num_breaks:
            raise ResponseError("a line does not end in CRLF")
        if len(data.translate(None, CONTROLS)) + 2 * num_breaks != len(data):
            raise ResponseError("the head has control characters")
        head = ResponseHead()
        status_line = lines[0]
        status = status_line[9:12]
        if status_line[:9] not in (b"HTTP/1.1 ", b"HTTP/1.0 ") or not status.isdigit():
            raise ResponseError("it does not begin with an HTTP/1.1 status")
        head.status, head.reason = int(status), status_line[13:]
        head.keep_alive = status_line[7] == 49  # HTTP/1.1
        known, forward = self._lines, []
        for line in lines[1:]:
            kind, name, value = known.get(line) or self._field(line)
            if kind == FORWARD:
                forward.append(line)
            elif kind == FRAMING:
                self._framing(head, name, value)
                if name in (b"content-type", b"retry-after"):
                    forward.append(line)
        if head.is_chunked and head.content_length is not None:
            raise ResponseError("its body has two lengths")
        if head.status < 200 or head.status in (204, 304):
            head.content_length, head.is_chunked = 0, False
        if head.content_length is None and not head.is_chunked:
            head.keep_alive = False
        forward.append(b"")
        head.forward = b"\r\n".join(forward)
        return head

    def _field(self, line: bytes) -> tuple[int, bytes, bytes]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.translate(None, TOKEN):
            raise ResponseError("a header field is malformed")
        name, value = name.lower(), value.strip(b" \t")
        if name in _FRAMING:
            kind = FRAMING
        elif name in _DROPPED or name.startswith((b"x-octavo-", b"access-control-")):
            kind = DROP
        else:
            kind = FORWARD
        if len(line) <= _MAX_KNOWN_BYTES and name != b"set-cookie":
            if len(self._lines) >= _MAX_KNOWN_LINES:
                self._lines.clear()
            self._lines[line] = (kind, name, value)
        return kind, name, value

    @staticmethod
    def _framing(head: ResponseHead, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18:
                raise ResponseError("its content-length is not a number")
            length = int(value)
            if head.content_length not in (None, length):
                raise ResponseError("it has two content-lengths")
            head.content_length = length
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or head.is_chunked:
                raise ResponseError("its transfer-encoding is not chunked")
            head.is_chunked = True
        elif name == b"content-type":
            head.content_type = value
            head.is_json = b"json" in value.lower()
            head.is_event_stream = value[:17].lower() == b"text/event-stream"
        elif name == b"retry-after":
            head.retry_after = value
        elif b"close" in list_items(value):
            head.keep_alive = False
