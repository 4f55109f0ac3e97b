"""The client's side of one answer: what was sent of it, and how it may still end.

nothing sent ──begin──► streaming ──► ended          an answer that is no stream is kept back
     │                     │                         until it is whole: one that breaks costs
     └──refuse──► ended    └──fail──► ended          the client nothing, it can be repeated
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from octavo_router.http import responses
from octavo_router.http.chunked import LAST_CHUNK, chunk
from octavo_router.proxy import heads
from octavo_router.proxy.events import COMMENT, error_events

if TYPE_CHECKING:
    from octavo_router.errors import Rejected
    from octavo_router.http.client_connection import ClientConnection
    from octavo_router.http.response_head import ResponseHead
    from octavo_router.proxy.heads import EndpointLines

_EMPTY_FRAMING: Final = b""


class ClientResponse:
    """Writes to one client. After each write `keeps_alive` is what `finish` must be passed."""

    __slots__ = (
        "_connection", "_is_chunked", "_lines", "explanation", "has_begun", "is_event_stream",
        "keeps_alive", "num_bytes", "request_id", "status",
    )  # fmt: skip

    def __init__(self, connection: ClientConnection, request_id: bytes) -> None:
        self._connection = connection
        self.request_id = request_id
        self._is_chunked = False
        head = connection.head
        self._lines = head.answer_lines if head is not None else b""
        self.explanation = b""  # a header line
        self.has_begun = False  # the client has a status
        self.is_event_stream = False
        self.keeps_alive = True
        self.status = 0
        self.num_bytes = 0  # of the body

    def send_whole(self, head: ResponseHead, lines: EndpointLines, body: bytes) -> None:
        """All of it at once."""
        self.status = head.status
        connection = self._connection
        # Hot path: once per request. The usual connection stays open, and needs no header for it.
        framing = b"" if connection.keeps_open else self._settle_connection()
        if head.status not in (204, 304):
            framing = b"content-length: %d\r\n%b" % (len(body), framing)
        connection.write(
            heads.answer_head(head, lines, self.request_id, framing, self._own_lines(), body)
        )
        self.num_bytes = len(body)

    def begin(self, head: ResponseHead, lines: EndpointLines) -> None:
        """Its status and fields; pieces follow."""
        if self.has_begun:  # it was begun early, while the client waited
            return
        self.is_event_stream = head.is_event_stream
        framing = self._settle_stream(head.content_length if not head.is_event_stream else None)
        self._begun(head.status)
        self._connection.write(
            heads.answer_head(head, lines, self.request_id, framing, self._own_lines())
        )

    def begin_events(self) -> None:
        """An event stream before any engine has spoken."""
        self.is_event_stream = True
        framing = self._settle_stream(None)
        self._begun(200)
        self._connection.write(
            b"".join(
                (
                    responses.status_line(200),
                    responses.REQUEST_ID,
                    self.request_id,
                    b"\r\n",
                    self._lines,
                    responses.EVENT_STREAM,
                    framing,
                    b"\r\n",
                )
            )
        )

    def write(self, data: bytes) -> None:
        """A piece of the body. Hot path: once per read from an engine."""
        self.num_bytes += len(data)
        self._connection.write(chunk(data) if self._is_chunked else data)

    def comment(self, text: str) -> None:
        """A sign of life inside an event stream."""
        self.write(f": {text}\n\n".encode())

    def end(self) -> None:
        if self._is_chunked:
            self._connection.write(LAST_CHUNK)

    def fail(self, error: Rejected) -> bool:
        """Ends it with an error. False: that cannot be said any more, only shown by aborting."""
        if not self.has_begun:
            self.keeps_alive = not (error.close or self._connection.wants_close)
            self.status = error.status
            self._connection.write(
                responses.refusal(
                    error,
                    self.request_id.decode(),
                    self._connection.head,
                    keep_alive=self.keeps_alive,
                )
            )
            return True
        if not self.is_event_stream:
            return False
        head = self._connection.head
        path = head.path if head is not None else ""
        self.write(error_events(error, path, self.request_id.decode()))
        self.end()
        return True

    def probe(self) -> bytes:
        """What a client ignores at this point."""
        if not (self.has_begun and self.is_event_stream):
            return b""
        return chunk(COMMENT) if self._is_chunked else COMMENT

    def _own_lines(self) -> bytes:
        return self._lines + self.explanation

    def _begun(self, status: int) -> None:
        self.status = status
        self.has_begun = True
        self._connection.has_begun = True

    def _settle_stream(self, content_length: int | None) -> bytes:
        head = self._connection.head
        if content_length is not None:
            return b"content-length: %d\r\n%b" % (content_length, self._settle_connection())
        if head is not None and head.is_http10:
            self.keeps_alive = False
            return responses.CLOSE
        self._is_chunked = True
        return responses.CHUNKED + self._settle_connection()

    def _settle_connection(self) -> bytes:
        connection = self._connection
        if connection.wants_close:
            self.keeps_alive = False
            return responses.CLOSE
        head = connection.head
        return responses.KEEP_ALIVE if head is not None and head.is_http10 else _EMPTY_FRAMING
