"""Makes a Job of a request's prompts and parameters, within the server's limits."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.errors import (
    ContextLengthExceeded,
    InvalidRequest,
)
from octavo_engine.server.generation.beam_search import read_beams
from octavo_engine.server.generation.job import Job
from octavo_engine.server.generation.kv_transfer import read_kv_source
from octavo_engine.server.generation.retention import read_retention
from octavo_engine.server.http.owner import owner_of
from octavo_engine.state.request import BACKGROUND

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.media.prompt import PromptMedia
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.server.generation.job import RouteSource
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.schemas import SamplingFields
    from octavo_engine.server.service import Service
    from octavo_engine.state.sampling_params import SamplingParams

    Note = Callable[[int, RequestOutput], None]


def make_job(
    service: Service, request: SamplingFields, request_id: str, prompts: list[list[int]],
    params: SamplingParams, model: str, media: PromptMedia | None = None,
) -> Job:  # fmt: skip
    """Of a model or adapter that is served. Raises InvalidRequest, ContextLengthExceeded."""
    if request.priority and service.engine.config.scheduler.policy != "priority":
        raise InvalidRequest(
            "priority needs a server started with --scheduling-policy priority", param="priority"
        )
    check_task("generate", service.engine.info)
    check_prompts(prompts, service.engine.info)
    limit = service.settings.limits.max_sequences
    if len(prompts) * params.n > limit:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n = {params.n} are more than {limit} answers", param="n"
        )
    salt = request.cache_salt or ""
    if len(salt) > service.settings.limits.max_salt_chars:
        longest = service.settings.limits.max_salt_chars
        raise InvalidRequest(f"cache_salt is longer than {longest} characters", param="cache_salt")
    return Job(
        request_id=request_id,
        prompts=prompts,
        params=params,
        priority=request.priority or 0,
        cache_salt=salt,
        adapter=service.model.adapters.get(model),
        media=media,
        kv_source=read_kv_source(
            getattr(request, "kv_transfer_params", None), service.engine.config.own_kv_transfer
        ),
        retention=read_retention(request, owner=""),
        is_prefetch=bool(getattr(request, "prefetch", None)),
        deadline_s=service.settings.request_timeout_s,
        beams=read_beams(
            request, params, service.engine.info.max_model_len - max(map(len, prompts))
        ),
    )


async def with_route(exchange: Exchange, service: Service, job: Job, source: RouteSource) -> Job:
    """The job with the route keys of its first prompt, its remaining time and its priority.

    Without a subscribed router no keys are computed; prompts cached before the first one subscribes
    are labelled when they are used again.
    """
    route = None
    if service.hub.was_joined:
        route = await service.model.labeller.route(
            exchange.fields,
            source.kind,
            job.prompts[0],
            source.text,
            render_next=source.render_next,
            adapter="" if job.adapter is None else job.adapter.digest,
            pictures=() if job.media is None else job.media.places,
        )
    if exchange.is_background:
        job = dataclasses.replace(job, priority=BACKGROUND)
    if exchange.group:
        job = dataclasses.replace(job, group=exchange.group)
    if job.retention is not None:
        retention = msgspec.structs.replace(
            job.retention, owner=owner_of(exchange, service.guard).hex()
        )
        job = dataclasses.replace(job, retention=retention)
    left_s = exchange.time_left_s(service.settings.request_timeout_s)
    if route is None and left_s is None:  # as it was made
        return job
    return dataclasses.replace(job, route=route, deadline_s=left_s)


def check_prompts(prompts: list[list[int]], info: ModelInfo) -> None:
    """All of them before the first one runs: a bad one must not leave the others half done."""
    for ids in prompts:
        if not ids:
            raise InvalidRequest("prompt is empty; it needs at least one token", param="prompt")
        if len(ids) >= info.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {info.max_model_len} tokens, the answer "
                f"included. However, your prompt has {len(ids)} tokens. Please reduce its length.",
                param="prompt",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= info.vocab_size:
            raise InvalidRequest(
                f"prompt: token id {low if low < 0 else high} is not in the vocabulary of "
                f"{info.vocab_size}",
                param="prompt",
            )


def default_max_tokens(wanted: int, prompts: list[list[int]], info: ModelInfo) -> int:
    """A default is cut to the room there is; what a client requested is not."""
    longest = max(map(len, prompts), default=0)
    return max(1, min(wanted, info.max_model_len - longest))
