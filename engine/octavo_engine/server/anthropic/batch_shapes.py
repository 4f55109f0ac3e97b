"""Bodies, queries and answers of /v1/messages/batches, in Anthropic's shapes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class MessageBatchItem(msgspec.Struct, kw_only=True):
    """One request, and the name that its result will have."""

    custom_id: str
    params: dict[str, Any]  # as the body of POST /v1/messages


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    requests: list[MessageBatchItem]


class MessageBatchCounts(msgspec.Struct, kw_only=True):
    """All are processing until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True, tag_field="type", tag="message_batch"):
    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str  # RFC 3339
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None  # since when the results are no longer there
    results_url: str | None  # once it has ended


class MessageBatchList(msgspec.Struct, kw_only=True):
    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchesQuery(msgspec.Struct, kw_only=True):
    limit: int | None = None
    after_id: str | None = None
    before_id: str | None = None


class DeletedMessageBatch(
    msgspec.Struct, kw_only=True, tag_field="type", tag="message_batch_deleted"
):
    id: str


# ── results ──


class SucceededResult(msgspec.Struct, kw_only=True, tag_field="type", tag="succeeded"):
    message: msgspec.Raw  # as POST /v1/messages answers


class ErroredResult(msgspec.Struct, kw_only=True, tag_field="type", tag="errored"):
    error: msgspec.Raw  # as POST /v1/messages answers


class CanceledResult(msgspec.Struct, kw_only=True, tag_field="type", tag="canceled"):
    pass


class ExpiredResult(msgspec.Struct, kw_only=True, tag_field="type", tag="expired"):
    pass


class MessageBatchResult(msgspec.Struct, kw_only=True):
    """One line of the results."""

    custom_id: str
    result: SucceededResult | ErroredResult | CanceledResult | ExpiredResult
