"""Texts in, vectors or scores out, as the API server sees it: requests are checked, submitted and
awaited."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.core.process import wire
from octavo_engine.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    RequestError,
)
from octavo_engine.state.pooling import PoolingRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.state.pooling import PoolingOutput, PoolingParams

PER_TOKEN = ("token_embed", "token_classify")
_SHOWN_DIMENSIONS = 12  # in an error


class PoolingItem(NamedTuple):
    """One text as the model reads it, special tokens included."""

    token_ids: list[int]
    type_ids: Sequence[int] = ()  # of pairs: which text each token is of; empty: all of the first


class WrongTask(InvalidRequest):
    """The model served here does something else."""

    code = "wrong_task"


def check_task(task: str, info: ModelInfo) -> None:
    """Raises WrongTask, which names what the model does."""
    if task not in info.tasks:
        raise WrongTask(
            f"the model {info.names[0]} cannot {task}; it can {', '.join(info.tasks)}",
            param="model",
        )


def check_items(items: Sequence[PoolingItem], params: PoolingParams, info: ModelInfo) -> None:
    """Raises a RequestError that names the field and the numbers."""
    check_task(params.task, info)
    _check_dimensions(params, info)
    if not items:
        raise InvalidRequest("the input is empty; it needs at least one text", param="input")
    columns = (params.dimensions or info.embedding_size) if params.task == "token_embed" else 0
    for index, item in enumerate(items):
        where = f"input {index}" if len(items) > 1 else "the input"
        length = len(item.token_ids)
        if length == 0:
            raise InvalidRequest(f"{where} has no tokens; it needs at least one", param="input")
        if length > info.max_model_len:
            raise ContextLengthExceeded(
                f"{where} has {length} tokens, but the model takes at most {info.max_model_len}; "
                "shorten it, or ask for truncation",
                param="input",
            )
        num_bytes = length * columns * 4
        if num_bytes > wire.MAX_FRAME - 2 * wire.ENVELOPE:
            raise InvalidRequest(
                f"{where} has {length} tokens; their vectors take {num_bytes} bytes, more than can "
                "be sent; shorten it, or ask for fewer dimensions",
                param="input",
            )
        low, high = min(item.token_ids), max(item.token_ids)
        if low < 0 or high >= info.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(
                f"{where}: token id {bad} is not in the vocabulary of {info.vocab_size}",
                param="input",
            )
        if item.type_ids and len(item.type_ids) != length:
            raise InvalidRequest(
                f"{where} has {length} tokens, but {len(item.type_ids)} type ids", param="input"
            )


def _check_dimensions(params: PoolingParams, info: ModelInfo) -> None:
    size = params.dimensions
    if size is None or size == info.embedding_size:
        return
    if params.task not in ("embed", "token_embed"):
        raise InvalidRequest(f"dimensions has no meaning for {params.task}", param="dimensions")
    if not info.dimensions:
        raise InvalidRequest(
            f"the model's embeddings have {info.embedding_size} dimensions and were not trained to "
            f"be cut; got dimensions {size}",
            param="dimensions",
        )
    if size not in info.dimensions:
        shown = ", ".join(map(str, info.dimensions[:_SHOWN_DIMENSIONS]))
        if len(info.dimensions) > _SHOWN_DIMENSIONS:
            shown = f"from {min(info.dimensions)} to {max(info.dimensions)}"
        raise InvalidRequest(
            f"dimensions must be {shown} for this model; got {size}", param="dimensions"
        )


def as_array(output: PoolingOutput, *, is_per_token: bool) -> NDArray[np.float32]:
    """[columns] of a whole text, [tokens, columns] of per-token tasks. Raises GenerationFailed."""
    if output.error is not None:
        raise GenerationFailed(output.error)
    values = np.frombuffer(output.data, "<f4")
    return values.reshape(output.rows, -1) if is_per_token else values


@dataclass(eq=False)
class _Job:
    """The texts of one call."""

    places: dict[str, int]  # of the request ids that are still out
    results: list[NDArray[np.float32] | None]
    is_per_token: bool
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class AsyncPooling:
    """Hands texts to the core and waits for what comes back. Belongs to the event loop."""

    def __init__(self, send: Callable[[wire.ToEngine], None]) -> None:
        self._send = send
        self._jobs: dict[str, _Job] = {}  # by request id
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        """Texts in flight."""
        return len(self._jobs)

    async def idle(self) -> None:
        await self._idle.wait()

    async def pool(
        self,
        items: Sequence[PoolingItem],
        params: PoolingParams,
        *,
        request_id: str,
        deadline_s: float | None,
    ) -> list[NDArray[np.float32]]:
        """In the order of the items. The first error ends the call; leaving it aborts the rest."""
        arrival_at = time.monotonic()
        requests = [
            PoolingRequest(
                request_id=f"{request_id}-{next(self._numbers)}",
                token_ids=item.token_ids,
                type_ids=list(item.type_ids),
                params=params,
                arrival_at=arrival_at,
                deadline_at=None if deadline_s is None else arrival_at + deadline_s,
            )
            for item in items
        ]
        job = _Job(
            places={r.request_id: i for i, r in enumerate(requests)},
            results=[None] * len(requests),
            is_per_token=params.task in PER_TOKEN,
        )
        self._jobs.update(dict.fromkeys(job.places, job))
        self._idle.clear()
        try:
            self._send(wire.AddPooling(requests))
            await job.done
            return [result for result in job.results if result is not None]
        finally:
            if job.places:
                self._send(wire.Abort(list(job.places)))
            for left in job.places:
                self._jobs.pop(left, None)
            if not self._jobs:
                self._idle.set()

    def receive(self, outputs: Sequence[PoolingOutput]) -> None:
        for output in outputs:
            job = self._jobs.pop(output.request_id, None)
            if job is None:
                continue  # its caller has left
            place = job.places.pop(output.request_id)
            try:
                job.results[place] = as_array(output, is_per_token=job.is_per_token)
            except GenerationFailed as error:
                _fail(job, error)
            if not job.places and not job.done.done():
                job.done.set_result(None)

    def refuse(self, request_id: str, error: RequestError) -> bool:
        """False if the request is none of ours."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        del job.places[request_id]
        _fail(job, error)
        return True

    def lose_all(self, error: RequestError) -> None:
        """The core is gone: nothing will come back."""
        for job in set(self._jobs.values()):
            job.places.clear()
            _fail(job, error)
        self._jobs.clear()


def _fail(job: _Job, error: RequestError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
