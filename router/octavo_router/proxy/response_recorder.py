"""An answer that is kept while it is written, so that it can be given again without running again.

    exchange ──writes──► Recorder ──► client's connection
    exchange ◄─reports── Recorder ◄── client's connection

It stands between the two for requests with an idempotency key; all others never meet it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from octavo_router.flow.idempotency import MAX_ANSWER_BYTES, StoredResponse
from octavo_router.http import responses
from octavo_router.http.chunked import ChunkDecoder, ChunkError
from octavo_router.http.response_head import ResponseError, ResponseHeadParser

if TYPE_CHECKING:
    from octavo_router.errors import Rejected
    from octavo_router.flow.idempotency import IdempotencyKeys, Run
    from octavo_router.http.client_connection import ClientConnection, ConnectionOwner
    from octavo_router.metrics.record import RequestRecord

REPLAYED: Final = ("idempotent-replayed", "true")
_MAX_BYTES: Final = 2 * MAX_ANSWER_BYTES  # with its head and its chunks' sizes


class ResponseRecorder:
    """To the exchange the connection, to the connection the owner."""

    def __init__(
        self,
        connection: ClientConnection,
        keys: IdempotencyKeys,
        run: Run,
        record: RequestRecord,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._run = run
        self._record = record
        self._pieces: list[bytes] = []
        self._size = 0
        self._owner: ConnectionOwner | None = None

    def __getattr__(self, name: str) -> Any:
        """What is only read: how it stands with the connection."""
        return getattr(self._connection, name)

    # -- as the connection

    def as_connection(self) -> ClientConnection:
        """All of it that exchanges use."""
        return cast("ClientConnection", self)

    @property
    def owner(self) -> ConnectionOwner | None:
        return self._owner

    @owner.setter
    def owner(self, owner: ConnectionOwner | None) -> None:
        self._owner = owner
        self._connection.owner = None if owner is None else self

    @property
    def deadline(self) -> float:
        return self._connection.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._connection.deadline = at

    @property
    def has_begun(self) -> bool:
        return self._connection.has_begun

    @has_begun.setter
    def has_begun(self, value: bool) -> None:
        self._connection.has_begun = value

    def write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= _MAX_BYTES:
            self._pieces.append(data)
        self._connection.write(data)

    def finish(self, *, keep_alive: bool) -> None:
        if self._record.outcome == "ok":
            self._keys.keep(self._run, self._whole())
        else:
            self._keys.forget(self._run)
        self._owner = None
        self._connection.finish(keep_alive=keep_alive)

    def abort(self) -> None:
        self._keys.forget(self._run)
        self._connection.abort()

    def _whole(self) -> StoredResponse | None:
        """What was written; None where it cannot be given again."""
        if self._size > _MAX_BYTES:
            return None
        text, _, body = b"".join(self._pieces).partition(b"\r\n\r\n")
        try:
            head = ResponseHeadParser().parse(text)
            if head.is_chunked:
                body = b"".join(ChunkDecoder(is_strict=True).feed(body))
        except (ResponseError, ChunkError):  # whatever an engine's fields may hold
            return None
        content_type = head.content_type.decode("latin-1")
        return StoredResponse(head.status, content_type, body, self._record.model)

    # -- as the owner

    def client_gone(self) -> None:
        self._keys.forget(self._run)
        if self._owner is not None:
            self._owner.client_gone()

    def client_paused(self) -> None:
        if self._owner is not None:
            self._owner.client_paused()

    def client_resumed(self) -> None:
        if self._owner is not None:
            self._owner.client_resumed()

    def client_too_slow(self) -> None:
        if self._owner is not None:
            self._owner.client_too_slow()

    def on_deadline(self, now: float) -> None:
        if self._owner is not None:
            self._owner.on_deadline(now)

    def shut_down(self, error: Rejected) -> None:
        if self._owner is not None:
            self._owner.shut_down(error)

    def probe(self) -> bytes:
        return b"" if self._owner is None else self._owner.probe()


def replay(connection: ClientConnection, answer: StoredResponse, request_id: str) -> None:
    """Gives a kept answer, whole: a stream comes at once."""
    head = connection.head
    keep_alive = not connection.wants_close
    connection.write(
        responses.whole(
            answer.status,
            answer.body,
            request_id=request_id,
            content_type=answer.content_type,
            fields=[REPLAYED],
            lines=head.answer_lines if head is not None else b"",
            keep_alive=keep_alive,
            is_http10=head is not None and head.is_http10,
        )
    )
    connection.finish(keep_alive=keep_alive)
