"""Writing heads of answers: status lines, the fields that each answer has, refusals."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.errors import Rejected
    from octavo_router.http.request_head import RequestHead

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED: Final = b"transfer-encoding: chunked\r\n"
CLOSE: Final = b"connection: close\r\n"
KEEP_ALIVE: Final = b"connection: keep-alive\r\n"  # HTTP/1.0 wants to hear it
EVENT_STREAM: Final = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
)

STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
REQUEST_ID: Final = REQUEST_ID_HEADER.encode() + b": "


def status_line(status: int, reason: bytes = b"") -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d %b\r\n" % (status, reason)


def refusal(
    error: Rejected,
    request_id: str,
    head: RequestHead | None,
    *,
    keep_alive: bool,
) -> bytes:
    """The whole answer to a request that is refused; `head` is None where it could not be read."""
    path = head.path if head is not None else error.path
    return whole(
        error.status,
        error.body(path, request_id),
        request_id=request_id,
        fields=error.fields(path, request_id),
        lines=head.answer_lines if head is not None else error.answer_lines,
        keep_alive=keep_alive and not error.close,
        is_http10=head is not None and head.is_http10,
        is_head=head is not None and head.method == "HEAD",
    )


def whole(
    status: int,
    body: bytes,
    *,
    request_id: str,
    content_type: str = "application/json",
    fields: Sequence[tuple[str, str]] = (),
    lines: bytes = b"",
    keep_alive: bool,
    is_http10: bool = False,
    is_head: bool = False,
) -> bytes:
    """An answer with all of its body. `lines`: of the head's, each with its CRLF."""
    parts = [status_line(status), REQUEST_ID, request_id.encode(), b"\r\n"]
    parts += [_line(name, value) for name, value in fields]
    parts.append(lines)
    if status not in (204, 304):
        parts.append(
            b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type.encode(), len(body))
        )
    if not keep_alive:
        parts.append(CLOSE)
    elif is_http10:
        parts.append(KEEP_ALIVE)
    parts.append(b"\r\n")
    if not is_head and status not in (204, 304):
        parts.append(body)
    return b"".join(parts)


def streamed_head(
    status: int,
    *,
    request_id: str,
    content_type: str,
    fields: Sequence[tuple[str, str]] = (),
    lines: bytes = b"",
    is_chunked: bool,
    keep_alive: bool,
) -> bytes:
    """The head of an answer whose body comes piece by piece; not chunked means: until the close."""
    parts = [status_line(status), REQUEST_ID, request_id.encode(), b"\r\n"]
    parts += [_line(name, value) for name, value in fields]
    parts.append(lines)
    parts.append(b"content-type: %b\r\n" % content_type.encode())
    if is_chunked:
        parts.append(CHUNKED)
    if not keep_alive:
        parts.append(CLOSE)
    parts.append(b"\r\n")
    return b"".join(parts)


def _line(name: str, value: str) -> bytes:
    # A line break in a value would begin a field of somebody else's choosing.
    safe = value.translate({13: " ", 10: " ", 0: " "})
    return f"{name}: {safe}\r\n".encode("latin-1", "replace")
