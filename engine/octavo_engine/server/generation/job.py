"""Running a request's prompts through the engine, as one stream of news."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.core.validate import tokenized_bad_words
from octavo_engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RequestError,
)
from octavo_engine.server.generation.beam_search import beam_search, read_beams
from octavo_engine.server.generation.gather import all_of
from octavo_engine.server.generation.inflight import names_of
from octavo_engine.server.generation.prompt_share import PromptShare
from octavo_engine.server.generation.timing import RequestTiming
from octavo_engine.server.http.request_log import OutputLog, log_request
from octavo_engine.server.routers.route_labels import Answers
from octavo_engine.state.request import BACKGROUND

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from octavo_engine.core.beam_search import BeamSearchParams
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.text.output_stream import InlineSink
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.protocol.route_keys import Kind
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.schemas import SamplingFields
    from octavo_engine.server.routers.route_labels import RoutedPrompt
    from octavo_engine.server.service import Service
    from octavo_engine.state.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that was parsed and checked, as the engine wants it."""

    request_id: str  # the client's or ours; the engine sees it with a suffix of our own
    prompts: list[list[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    # Of a stream that a router can go on with elsewhere, see server.resume:
    seed: int | None = None  # that all seeds follow from
    seeds: tuple[int, ...] = ()  # one a prompt
    told: tuple[ResumedOutput, ...] = ()  # prompt-major; empty unless resumed
    route: RoutedPrompt | None = None  # how routers know the first prompt
    beams: BeamSearchParams | None = None  # the likeliest answers are searched, not sampled
    group: str = ""  # the request that this one and others are parts of; empty: a whole one

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def make_job(
    service: Service, request: SamplingFields, request_id: str, prompts: list[list[int]],
    params: SamplingParams,
) -> Job:  # fmt: skip
    """Raises InvalidRequest, ContextLengthExceeded."""
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
        deadline_s=service.settings.request_timeout_s,
        beams=read_beams(
            request, params, service.engine.info.max_model_len - max(map(len, prompts))
        ),
    )


async def routed(
    exchange: Exchange, service: Service, job: Job, kind: Kind, *, text: str | None = None,
    render_next: Callable[[str], Awaitable[str]] | None = None,
) -> Job:  # fmt: skip
    """The job with the route keys of its first prompt, the time it has left, and its place in line.

    Of a chat, `text` is its rendered prompt. A server that no router ever listened to does not
    pay for keys; what it cached before the first one came is named when it is used again.
    """
    route = None
    if service.hub.was_joined:
        route = await service.labeller.route(
            exchange.fields, kind, job.prompts[0], text, render_next=render_next
        )
    if exchange.is_background:
        job = dataclasses.replace(job, priority=BACKGROUND)
    if exchange.group:
        job = dataclasses.replace(job, group=exchange.group)
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
    """A default is cut to the room there is; what a client asked for is not."""
    longest = max(map(len, prompts), default=0)
    return max(1, min(wanted, info.max_model_len - longest))


async def run(
    service: Service, job: Job, *, stream: bool, tap: InlineSink[JobOutput] | None = None
) -> AsyncGenerator[JobOutput, None]:
    """News of all prompts as they come, but for those that `tap` takes: it is offered those of a
    single prompt. Closing it aborts what still runs. Raises RequestError."""
    watch = RequestTiming(service.metrics, job)
    params = await tokenized_bad_words(job.params, service.engine.tokenizer)
    if params is not job.params:  # once for all of its prompts
        job = dataclasses.replace(job, params=params)
    if service.settings.log_requests:
        log_request(service, job)
    note: Callable[[int, RequestOutput], None] = watch.note
    if service.settings.log_outputs:
        note = _both(watch.note, OutputLog(service, job).note)
    ids = _engine_ids(job)
    if not job.group and (len(ids) > 1 or job.beams is not None):
        job = dataclasses.replace(job, group=ids[0])

    is_stopped = False

    async def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        for id_ in ids:
            await service.engine.abort(id_)

    with service.running.track((*ids, *names_of(job.request_id)), stop):
        try:
            if job.beams is not None:
                found = await _beams(service, job, job.beams, ids, lambda: is_stopped)
                for index, output in enumerate(found):
                    note(index, output)
                    yield JobOutput(index, output)
                return
            if len(job.prompts) == 1:
                answers = Answers()

                def noted(output: RequestOutput) -> JobOutput:
                    note(0, output)
                    if job.route is not None:
                        answers.add(output)
                    return JobOutput(0, output)

                tapped = None if tap is None else tap.after(noted)
                async with aclosing(
                    _one(service, job, 0, ids[0], stream=stream, tap=tapped)
                ) as news:
                    async for output in news:
                        yield noted(output)
                if job.route is not None:
                    service.labeller.settle(job.route, answers)
                return
            async with aclosing(_merged(service, job, ids, stream=stream)) as pieces:
                async for piece in pieces:
                    note(piece.prompt_index, piece.news)
                    yield piece
        except DeadlineExceeded:
            watch.give_up("deadline")
            raise
        except RequestError as error:
            if error.status < 500:
                watch.refuse()
            watch.give_up("error")
            raise
        finally:
            watch.give_up("abort")  # what is unfinished still: the client left


async def _beams(
    service: Service, job: Job, params: BeamSearchParams, ids: list[str],
    is_stopped: Callable[[], bool],
) -> list[RequestOutput]:  # fmt: skip
    """What is found for each prompt."""
    share = PromptShare(service, job.params.n)
    searches = [
        partial(beam_search, service, job, params, index, id_, is_stopped)
        for index, id_ in enumerate(ids)
    ]
    return await all_of([share.of(search) for search in searches])


def _both(
    first: Callable[[int, RequestOutput], None], second: Callable[[int, RequestOutput], None]
) -> Callable[[int, RequestOutput], None]:
    def note(prompt_index: int, news: RequestOutput) -> None:
        first(prompt_index, news)
        second(prompt_index, news)

    return note


@dataclass(frozen=True, slots=True)
class JobOutput:
    """News of one of a request's prompts."""

    prompt_index: int
    news: RequestOutput


def _engine_ids(job: Job) -> list[str]:
    """One a prompt. A client's id may come twice; ours never does."""
    own = secrets.token_hex(4)
    return [f"{job.request_id}-{number}-{own}" for number in range(len(job.prompts))]


def _one(
    service: Service, job: Job, prompt_index: int, request_id: str, *, stream: bool,
    tap: InlineSink[RequestOutput] | None = None,
) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
    params, n = job.params, job.params.n
    if job.seeds:
        params = msgspec.structs.replace(params, seed=job.seeds[prompt_index])
    return service.engine.generate(
        job.prompts[prompt_index],
        params,
        request_id=request_id,
        priority=job.priority,
        deadline_s=job.deadline_s,
        cache_salt=job.cache_salt,
        told=job.told[prompt_index * n : (prompt_index + 1) * n],
        labels=job.route.labels if job.route is not None and prompt_index == 0 else None,
        stream=stream,
        tap=tap,
        group=job.group,
    )


async def _merged(
    service: Service, job: Job, ids: list[str], *, stream: bool
) -> AsyncGenerator[JobOutput, None]:
    """All prompts at once; the first error ends them all."""
    # A bound of one piece keeps a slow reader's back-pressure on every one of them.
    queue: asyncio.Queue[JobOutput | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(prompt_index: int) -> None:
        try:
            async with aclosing(
                _one(service, job, prompt_index, ids[prompt_index], stream=stream)
            ) as news:
                async for output in news:
                    await queue.put(JobOutput(prompt_index, output))
        except Exception as error:  # handed to the reader, who decides
            await queue.put(error)
        else:
            await queue.put(None)

    share = PromptShare(service, job.params.n)

    async def pump_in_turn(prompt_index: int) -> None:
        async with share:
            await pump(prompt_index)

    pumps = [asyncio.create_task(pump_in_turn(index)) for index in range(len(job.prompts))]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)
