"""Running a request's prompts through the engine and watching the clock while the news come out."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RequestError,
)
from octavo_engine.server.residency import Answers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.outputs import RequestOutput
    from octavo_engine.core.told import Told
    from octavo_engine.metrics import EngineMetrics
    from octavo_engine.protocol.route_keys import Kind
    from octavo_engine.server.exchange import Exchange
    from octavo_engine.server.residency import Route
    from octavo_engine.server.schemas import SamplingFields
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
    told: tuple[Told, ...] = ()  # prompt-major; empty unless resumed
    route: Route | None = None  # how routers know the first prompt

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
    check_prompts(prompts, service.engine.info)
    limit = service.settings.limits.max_sequences
    if len(prompts) * params.n > limit:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n = {params.n} are more than {limit} answers", param="n"
        )
    return Job(
        request_id=request_id,
        prompts=prompts,
        params=params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        deadline_s=service.settings.request_timeout_s,
    )


async def routed(
    exchange: Exchange, service: Service, job: Job, kind: Kind, *, text: str | None = None,
    render_next: Callable[[str], Awaitable[str]] | None = None,
) -> Job:  # fmt: skip
    """The job with the route keys of its first prompt; of a chat, `text` is its rendered prompt."""
    route = await service.labeller.route(
        exchange.fields, kind, job.prompts[0], text, render_next=render_next
    )
    return dataclasses.replace(job, route=route)


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


async def run(service: Service, job: Job, *, stream: bool) -> AsyncGenerator[Piece, None]:
    """News of all prompts as they come. Closing it aborts what still runs. Raises RequestError."""
    watch = Stopwatch(service.metrics, job)
    try:
        if len(job.prompts) == 1:
            answers = Answers()
            async with aclosing(_one(service, job, 0, stream=stream)) as news:
                async for output in news:
                    watch.note(0, output)
                    if job.route is not None:
                        answers.add(output)
                    yield Piece(0, output)
            if job.route is not None:
                service.labeller.settle(job.route, answers)
            return
        async with aclosing(_merged(service, job, stream=stream)) as pieces:
            async for piece in pieces:
                watch.note(piece.prompt_index, piece.news)
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


@dataclass(frozen=True, slots=True)
class Piece:
    """News of one of a request's prompts."""

    prompt_index: int
    news: RequestOutput


def _one(
    service: Service, job: Job, prompt_index: int, *, stream: bool
) -> AsyncGenerator[RequestOutput, None]:
    params, n = job.params, job.params.n
    if job.seeds:
        params = msgspec.structs.replace(params, seed=job.seeds[prompt_index])
    return service.engine.generate(
        job.prompts[prompt_index],
        params,
        # A client's id may come twice; ours never does.
        request_id=f"{job.request_id}-{prompt_index}-{secrets.token_hex(4)}",
        priority=job.priority,
        deadline_s=job.deadline_s,
        cache_salt=job.cache_salt,
        told=job.told[prompt_index * n : (prompt_index + 1) * n],
        labels=job.route.labels if job.route is not None and prompt_index == 0 else None,
        stream=stream,
    )


async def _merged(service: Service, job: Job, *, stream: bool) -> AsyncGenerator[Piece, None]:
    """All prompts at once; the first error ends them all."""
    # A bound of one piece keeps a slow reader's back-pressure on every one of them.
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(prompt_index: int) -> None:
        try:
            async with aclosing(_one(service, job, prompt_index, stream=stream)) as news:
                async for output in news:
                    await queue.put(Piece(prompt_index, output))
        except Exception as error:  # handed to the reader, who decides
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(index)) for index in range(len(job.prompts))]
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


class Stopwatch:
    """Observes latencies and token counts of a request. Hot path: once per piece of news."""

    def __init__(
        self, metrics: EngineMetrics, job: Job, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._now = now
        self._arrived_at = now()
        self._first_at: dict[tuple[int, int], float] = {}
        self._last_at: dict[tuple[int, int], float] = {}
        ended = sum(told.ended for told in job.told)
        self._unfinished = len(job.prompts) * job.params.n - ended
        for ids in job.prompts:
            metrics.prompt_tokens.observe(len(ids))
        metrics.params_n.observe(job.params.n)
        if job.params.max_tokens is not None:
            metrics.params_max_tokens.observe(job.params.max_tokens)

    def note(self, prompt_index: int, news: RequestOutput) -> None:
        now = self._now()
        if news.queued_s is not None:
            self._metrics.queue_time.observe(news.queued_s)
        for output in news.outputs:
            place = (prompt_index, output.index)
            if output.token_ids:
                last_at = self._last_at.get(place)
                if last_at is None:
                    self._first_at[place] = now
                    if output.index == 0:
                        self._metrics.time_to_first_token.observe(now - self._arrived_at)
                else:
                    self._metrics.inter_token_latency.observe(now - last_at)
                self._last_at[place] = now
            if output.finish_reason is not None:
                self._finish(place, output.finish_reason, output.num_tokens, now)

    def refuse(self) -> None:
        """It was no request that could be served: nothing of it finishes."""
        self._unfinished = 0

    def give_up(self, reason: str) -> None:
        """Count what did not finish; a second call finds nothing left."""
        self._metrics.finished[reason] += self._unfinished
        self._unfinished = 0

    def _finish(self, place: tuple[int, int], reason: str, num_tokens: int, now: float) -> None:
        metrics = self._metrics
        self._unfinished -= 1
        metrics.finished[reason] = metrics.finished.get(reason, 0) + 1
        metrics.generation_tokens.observe(num_tokens)
        metrics.e2e_latency.observe(now - self._arrived_at)
        if num_tokens > 1:
            first_at = self._first_at.get(place, self._arrived_at)
            metrics.time_per_output_token.observe((now - first_at) / (num_tokens - 1))
