"""What every pooling endpoint does between its two shapes: check, run, count, answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine import tracing
from octavo_engine.core.pooling.async_pooling import WrongTask
from octavo_engine.errors import DeadlineExceeded, InvalidRequest, RequestError
from octavo_engine.server.generation.inflight import names_of
from octavo_engine.server.http.errors import not_supported
from octavo_engine.server.http.request_ids import adopt

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.core.pooling.async_pooling import PoolingItem
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.pooling.bodies import PoolingFields
    from octavo_engine.server.service import Service
    from octavo_engine.state.pooling import PoolingParams, PoolingTask

_PER_TOKEN = ("token_embed", "token_classify")
_SLICE = 64  # texts written before other work gets its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPooling:
    """Under which names an answer goes out, and when it was requested."""

    id: str
    model: str
    created: int


def begin(
    exchange: Exchange, service: Service, request: PoolingFields, kind: str
) -> PreparedPooling:
    """Checks what all bodies share. Raises RequestError."""
    model = service.model.check_name(request.model)
    if request.mm_processor_kwargs not in (None, {}):
        raise not_supported("mm_processor_kwargs", "this model reads text only")
    if request.padding == "max_length":
        raise not_supported("padding", "texts are computed as long as they are")
    longest = service.settings.limits.max_salt_chars
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= longest:
        raise InvalidRequest(f"cache_salt must have 1 to {longest} characters", param="cache_salt")
    if request.priority:
        raise not_supported("priority", "texts are read in the order in which they came")
    adopt(exchange, request.request_id)
    return PreparedPooling(
        id=f"{kind}-{exchange.request_id}", model=model, created=int(time.time())
    )


def choose(service: Service, *tasks: PoolingTask) -> PoolingTask:
    """The first of these that the model can do. Raises WrongTask, which names what it does."""
    info = service.engine.info
    for task in tasks:
        if task in info.tasks:
            return task
    raise WrongTask(
        f"the model {info.names[0]} cannot {' or '.join(tasks)}; it can {', '.join(info.tasks)}",
        param="model",
    )


async def pool(
    exchange: Exchange, service: Service, prepared: PreparedPooling, items: list[PoolingItem],
    params: PoolingParams,
) -> list[NDArray[np.float32]]:  # fmt: skip
    """One array an item. A client that leaves aborts it. Raises RequestError."""
    _check_size(service, items, params)
    metrics, began_at = service.metrics, time.monotonic()
    trace = tracing.current()
    if trace is not None:
        trace.timeline.input_tokens += num_tokens(items)
    reason = "abort"
    try:
        async with exchange.while_present():
            left_s = exchange.time_left_s(service.settings.request_timeout_s)
            rows = await _stoppable(service, prepared, items, params, left_s)
        reason = "stop"
    except DeadlineExceeded:
        reason = "deadline"
        raise
    except RequestError as error:
        reason = "error" if error.status >= 500 else ""  # a bad request was never taken in
        raise
    finally:
        if reason:
            metrics.finished[reason] += len(items)
            metrics.e2e_latency.observe(time.monotonic() - began_at)
            for item in items:
                metrics.prompt_tokens.observe(len(item.token_ids))
    return rows


async def _stoppable(
    service: Service, prepared: PreparedPooling, items: list[PoolingItem], params: PoolingParams,
    deadline_s: float | None,
) -> list[NDArray[np.float32]]:  # fmt: skip
    inner = f"{prepared.id}-{secrets.token_hex(4)}"  # a client's id may come twice; ours never does
    work = asyncio.ensure_future(
        service.engine.pool(items, params, request_id=inner, deadline_s=deadline_s)
    )

    async def stop() -> None:
        work.cancel()

    with service.running.track((inner, *names_of(prepared.id)), stop):
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # its client has left
            raise RequestError("the request was aborted by its id", code="aborted") from None


def num_tokens(items: Iterable[PoolingItem]) -> int:
    return sum(len(item.token_ids) for item in items)


def usage(items: Iterable[PoolingItem]) -> dict[str, Any]:
    count = num_tokens(items)
    return {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


async def reply_list(
    exchange: Exchange, prepared: PreparedPooling, data: Iterable[bytes], usage: dict[str, Any]
) -> None:
    """OpenAI's list object around entries that are JSON already. Others get a turn in between."""
    head = msgspec.json.encode(
        {"id": prepared.id, "object": "list", "created": prepared.created, "model": prepared.model}
    )
    entries: list[bytes] = []
    for entry in data:
        entries.append(entry)
        if len(entries) % _SLICE == 0:
            await asyncio.sleep(0)
    parts = (head[:-1], b',"data":[', b",".join(entries), b'],"usage":', msgspec.json.encode(usage))
    await exchange.reply(b"".join((*parts, b"}")))


def _check_size(service: Service, items: list[PoolingItem], params: PoolingParams) -> None:
    limits, info = service.settings.limits, service.engine.info
    count = num_tokens(items)
    if count > limits.max_pooling_tokens:
        raise InvalidRequest(
            f"the texts must have at most {limits.max_pooling_tokens} tokens together; "
            f"got {count}; send them in several requests",
            param="input",
        )
    if params.task in _PER_TOKEN:
        columns = max(1, info.embedding_size if params.task == "token_embed" else len(info.labels))
        if count * columns > limits.max_pooled_numbers:
            raise InvalidRequest(
                f"{count} tokens times {columns} numbers are more than the "
                f"{limits.max_pooled_numbers} that one answer may hold; send fewer texts",
                param="input",
            )
