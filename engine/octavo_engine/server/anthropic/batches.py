"""/v1/messages/batches: message requests to be answered when there is time."""

from __future__ import annotations

import asyncio
import re
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.admin.dev import read_query
from octavo_engine.server.anthropic import batch_shapes as shapes
from octavo_engine.server.anthropic.paging import page_of
from octavo_engine.server.anthropic.shapes import AnthropicError, AnthropicErrorDetail
from octavo_engine.server.http.errors import OUR_FAULT, HttpError, unavailable
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.batches.lines import CANCELLED, EXPIRED, MESSAGES_URL
from octavo_engine.server.openai.batches.shapes import BatchObject
from octavo_engine.server.openai.batches.shelf import BatchRecord
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from pathlib import Path

    from octavo_engine.server.openai.batches.runner import BatchRunner
    from octavo_engine.server.openai.batches.storage import Storage

WINDOW_H = 24
RESULTS_S = 29 * 24 * 3600  # so long results are kept, as Anthropic keeps them
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NUM_LINES = 64  # results that are read and written at once


async def create_message_batch(exchange: Exchange, service: Service) -> None:
    batches = _batches_of(service)
    request = await exchange.json(shapes.MessageBatchRequest)
    if service.admission.is_draining:
        raise unavailable("draining", "The server is shutting down.", retry_after_s=1)
    _check(request, service.settings.limits.max_batch_requests)
    shelf = batches.shelf
    now = int(shelf.now())
    batch = BatchObject(
        id=f"msgbatch_{secrets.token_hex(12)}",
        endpoint=MESSAGES_URL,
        input_file_id="",
        completion_window=f"{WINDOW_H}h",
        status="in_progress",
        created_at=now,
        in_progress_at=now,
        expires_at=now + WINDOW_H * 3600,
    )
    batch.request_counts.total = len(request.requests)
    record = BatchRecord(
        batch=batch, owner=owner_of(exchange, service.guard).hex(), keeps_s=RESULTS_S,
        api="anthropic",
    )  # fmt: skip
    path = shelf.upload_path()
    try:
        shelf.check_room(await asyncio.to_thread(_write, shelf.storage, path, request))
        shelf.make_room_for_batch()
        batches.start_batch(record, path)
    finally:
        path.unlink(missing_ok=True)
    await exchange.reply(msgspec.json.encode(_shown(exchange, batches, record)))


async def list_message_batches(exchange: Exchange, service: Service) -> None:
    """The newest first."""
    batches = _batches_of(service)
    query = read_query(exchange, shapes.MessageBatchesQuery)
    owner = owner_of(exchange, service.guard).hex()
    page, has_more = page_of(
        batches.shelf.records_of(owner, "anthropic")[::-1], lambda record: record.batch.id,
        "message batch", limit=query.limit, after_id=query.after_id, before_id=query.before_id,
    )  # fmt: skip
    answer = shapes.MessageBatchList(
        data=[_shown(exchange, batches, record) for record in page], has_more=has_more,
        first_id=page[0].batch.id if page else None, last_id=page[-1].batch.id if page else None,
    )  # fmt: skip
    await exchange.reply(msgspec.json.encode(answer))


async def get_message_batch(exchange: Exchange, service: Service) -> None:
    batches = _batches_of(service)
    record = _found(exchange, service, batches)
    await exchange.reply(msgspec.json.encode(_shown(exchange, batches, record)))


async def cancel_message_batch(exchange: Exchange, service: Service) -> None:
    """One that has ended stays as it is."""
    batches = _batches_of(service)
    record = _found(exchange, service, batches)
    batches.cancel(record)
    await exchange.reply(msgspec.json.encode(_shown(exchange, batches, record)))


async def delete_message_batch(exchange: Exchange, service: Service) -> None:
    """Its results too. One that runs must be cancelled first."""
    batches = _batches_of(service)
    record = _found(exchange, service, batches)
    if not record.batch.is_over:
        raise InvalidRequest(
            f"The batch {record.batch.id} has not ended; cancel it first, and delete it once its "
            "processing_status is ended.",
            param="message_batch_id",
        )
    batches.shelf.drop_batch(record)
    await exchange.reply(msgspec.json.encode(shapes.DeletedMessageBatch(id=record.batch.id)))


async def get_message_batch_results(exchange: Exchange, service: Service) -> None:
    """One line a request: the answered ones first, each group in the order of the requests."""
    batches = _batches_of(service)
    record = _found(exchange, service, batches)
    if not record.batch.is_over:
        raise InvalidRequest(
            f"The batch {record.batch.id} has no results yet; wait until its processing_status is "
            "ended.",
            param="message_batch_id",
        )
    paths = batches.shelf.results_of(record)
    if not paths:
        raise HttpError(
            404,
            f"The results of the batch {record.batch.id} are no longer here.",
            param="message_batch_id",
            code="batch_not_found",
        )
    files = [
        batches.shelf.storage.read(path) for path in paths
    ]  # all of them: a delete ends no stream half-way
    try:
        await exchange.open_stream([(b"content-type", b"application/x-jsonl")])
        async with exchange.while_present():
            for file in files:
                while lines := await asyncio.to_thread(_next_results, file):
                    await exchange.write(lines)
            await exchange.close()
    finally:
        for file in files:
            file.close()


def _batches_of(service: Service) -> BatchRunner:
    """Raises HttpError (501) where nothing is stored."""
    if service.batches is None:
        raise HttpError(
            501,
            "Message batches need a folder to be stored in; start the server with --files-dir.",
            code="not_implemented",
        )
    return service.batches


def _found(exchange: Exchange, service: Service, batches: BatchRunner) -> BatchRecord:
    id_ = str(exchange.scope["path_params"]["message_batch_id"])
    return batches.shelf.batch(id_, owner_of(exchange, service.guard).hex(), "anthropic")


def _check(request: shapes.MessageBatchRequest, limit: int) -> None:
    """Whatever would make the batch itself senseless. What is wrong with a request's params is in
    its own result. Raises InvalidRequest."""
    if not 1 <= len(request.requests) <= limit:
        raise InvalidRequest(
            f"requests must hold between 1 and {limit} requests; got {len(request.requests)}",
            param="requests",
        )
    ids: set[str] = set()
    for number, item in enumerate(request.requests):
        field = f"requests[{number}].custom_id"
        if not _CUSTOM_ID.fullmatch(item.custom_id):
            raise InvalidRequest(
                f"{field} must be 1 to 64 letters, digits, hyphens or underscores", param=field
            )
        if item.custom_id in ids:
            raise InvalidRequest(f"{field} {item.custom_id} was given before", param=field)
        ids.add(item.custom_id)
        if item.params.get("stream"):
            field = f"requests[{number}].params.stream"
            raise InvalidRequest(f"{field} must not be true in a batch", param=field)


def _write(storage: Storage, path: Path, request: shapes.MessageBatchRequest) -> int:
    """The requests as lines of a batch; the bytes that they take."""
    with storage.write(path) as file:
        for item in request.requests:
            line = {"custom_id": item.custom_id, "url": MESSAGES_URL, "body": item.params}
            file.write(msgspec.json.encode(line) + b"\n")
        return file.tell()


# ── what is shown ──


def _shown(exchange: Exchange, batches: BatchRunner, record: BatchRecord) -> shapes.MessageBatch:
    batch = record.batch
    has_ended = batch.is_over
    ended_at = batch.completed_at or batch.cancelled_at or batch.expired_at or batch.failed_at
    has_results = has_ended and bool(batches.shelf.results_of(record))
    return shapes.MessageBatch(
        id=batch.id,
        processing_status=(
            "ended" if has_ended else "canceling" if batch.status == "cancelling" else "in_progress"
        ),
        request_counts=_counts(record),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_time(ended_at) if has_ended and ended_at is not None else None,
        cancel_initiated_at=None if batch.cancelling_at is None else _time(batch.cancelling_at),
        archived_at=(
            _time((ended_at or 0) + RESULTS_S)
            if has_ended and not has_results and batch.status != "failed"
            else None
        ),
        results_url=_results_url(exchange, batch.id) if has_results else None,
    )


def _counts(record: BatchRecord) -> shapes.MessageBatchCounts:
    batch, counts = record.batch, record.batch.request_counts
    if not batch.is_over:
        return shapes.MessageBatchCounts(processing=counts.total)
    if batch.status == "failed":
        return shapes.MessageBatchCounts(errored=counts.total)
    rest = record.num_unanswered
    return shapes.MessageBatchCounts(
        succeeded=counts.completed,
        errored=counts.failed - rest,
        canceled=rest if batch.status == "cancelled" else 0,
        expired=rest if batch.status == "expired" else 0,
    )


def _results_url(exchange: Exchange, batch_id: str) -> str:
    """As the client addresses this server; the path alone where it does not say."""
    scope = exchange.scope
    host = exchange.header(b"host")
    base = f"{scope['scheme']}://{host}" if host else ""
    return f"{base}{scope.get('root_path', '')}{MESSAGES_URL}/batches/{batch_id}/results"


def _time(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ── results ──


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw
    request_id: str = ""


class _Problem(msgspec.Struct):
    code: str


class _Line(msgspec.Struct):
    """One of a batch's own lines, see `batches.lines`."""

    custom_id: str
    response: _Response | None = None
    error: _Problem | None = None


def _next_results(file: Any) -> bytes:
    """The next lines in Anthropic's form; empty at the end."""
    lines = []
    for line in file:
        lines.append(msgspec.json.encode(_result(msgspec.json.decode(line, type=_Line))) + b"\n")
        if len(lines) == _NUM_LINES:
            break
    return b"".join(lines)


def _result(line: _Line) -> shapes.MessageBatchResult:
    result: (
        shapes.SucceededResult | shapes.ErroredResult | shapes.CanceledResult | shapes.ExpiredResult
    )
    response, code = line.response, "" if line.error is None else line.error.code
    if response is not None and response.status_code == 200:
        result = shapes.SucceededResult(message=response.body)
    elif response is not None:
        result = shapes.ErroredResult(error=response.body)
    elif code == CANCELLED:
        result = shapes.CanceledResult()
    elif code == EXPIRED:
        result = shapes.ExpiredResult()
    else:
        detail = AnthropicErrorDetail(type="api_error", message=OUR_FAULT)
        error = msgspec.json.encode(AnthropicError(error=detail, request_id=""))
        result = shapes.ErroredResult(error=msgspec.Raw(error))
    return shapes.MessageBatchResult(custom_id=line.custom_id, result=result)
