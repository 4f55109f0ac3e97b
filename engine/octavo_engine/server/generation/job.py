"""A request that was parsed and checked, and its run through the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo_engine.core.pooling.async_pooling import check_task
from octavo_engine.core.text.output_stream import OutputSink
from octavo_engine.core.text.submission import Submission
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
    from collections.abc import Awaitable, Callable

    from octavo_engine.core.beam_search import BeamSearchParams
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.protocol.route_keys import Kind
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.openai.schemas import SamplingFields
    from octavo_engine.server.routers.route_labels import RoutedPrompt
    from octavo_engine.server.service import Service
    from octavo_engine.state.sampling_params import SamplingParams

    Note = Callable[[int, RequestOutput], None]


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
    resumed: tuple[ResumedOutput, ...] = ()  # prompt-major; empty unless resumed
    route: RoutedPrompt | None = None  # how routers know the first prompt
    beams: BeamSearchParams | None = None  # the likeliest answers are searched, not sampled

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


class RouteSource(NamedTuple):
    """What the route keys of a prompt are made from."""

    kind: Kind  # the shape of the body that came, by which routers know it
    text: str | None = None  # of a chat: its rendered prompt
    render_next: Callable[[str], Awaitable[str]] | None = None


async def with_route(exchange: Exchange, service: Service, job: Job, source: RouteSource) -> Job:
    """The job with the route keys of its first prompt, its remaining time and its priority.

    Without a subscribed router no keys are computed; prompts cached before the first one subscribes
    are labelled when they are used again.
    """
    route = None
    if service.hub.was_joined:
        route = await service.labeller.route(
            exchange.fields,
            source.kind,
            job.prompts[0],
            source.text,
            render_next=source.render_next,
        )
    if exchange.is_background:
        job = dataclasses.replace(job, priority=BACKGROUND)
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


async def run(service: Service, job: Job, sink: OutputSink[JobOutput], *, stream: bool) -> None:
    """All prompts to their ends; their outputs go to `sink` as they come, with `stream` false one a
    prompt. Cancelling it aborts what still runs. Raises RequestError."""
    timing = RequestTiming(service.metrics, job)
    params = await tokenized_bad_words(job.params, service.engine.tokenizer)
    if params is not job.params:  # once for all of its prompts
        job = dataclasses.replace(job, params=params)
    if service.settings.log_requests:
        log_request(service, job)
    note: Note = timing.note
    if service.settings.log_outputs:
        note = _both(timing.note, OutputLog(service, job).note)
    ids = _engine_ids(job)

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
                    await sink.put(JobOutput(index, output))
            elif len(job.prompts) == 1:
                await _run_one(service, job, ids[0], sink, note, stream=stream)
            else:
                await _run_all(service, job, ids, sink, note, stream=stream)
        except DeadlineExceeded:
            timing.give_up("deadline")
            raise
        except RequestError as error:
            if error.status < 500:
                timing.refuse()
            timing.give_up("error")
            raise
        finally:
            timing.give_up("abort")  # what is unfinished still: the client left


async def collect(service: Service, job: Job) -> list[JobOutput]:
    """The outputs of a request that is not streamed. Raises RequestError."""
    outputs: list[JobOutput] = []

    async def put(output: JobOutput) -> None:
        outputs.append(output)

    await run(service, job, OutputSink(put), stream=False)
    return outputs


async def _run_one(
    service: Service, job: Job, request_id: str, sink: OutputSink[JobOutput], note: Note, *,
    stream: bool,
) -> None:  # fmt: skip
    answers = Answers()

    def noted(output: RequestOutput) -> JobOutput:
        note(0, output)
        if job.route is not None:
            answers.add(output)
        return JobOutput(0, output)

    submission = _submission(job, 0, request_id, stream=stream)
    await service.engine.deliver(submission, sink.after(noted))
    if job.route is not None:
        service.labeller.settle(job.route, answers)


async def _run_all(
    service: Service, job: Job, ids: list[str], sink: OutputSink[JobOutput], note: Note, *,
    stream: bool,
) -> None:  # fmt: skip
    """All prompts at once; the first error ends them all."""
    share = PromptShare(service, job.params.n)
    turn = asyncio.Lock()  # a consumer that waits holds back every prompt

    async def deliver(index: int, request_id: str) -> None:
        async def put(output: RequestOutput) -> None:
            async with turn:
                note(index, output)
                await sink.put(JobOutput(index, output))

        submission = _submission(job, index, request_id, stream=stream)
        await service.engine.deliver(submission, OutputSink(put))

    await all_of([share.of(partial(deliver, index, id_)) for index, id_ in enumerate(ids)])


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


def _both(first: Note, second: Note) -> Note:
    def note(prompt_index: int, output: RequestOutput) -> None:
        first(prompt_index, output)
        second(prompt_index, output)

    return note


class JobOutput(NamedTuple):
    """New output of one of a request's prompts."""

    prompt_index: int
    output: RequestOutput


def _engine_ids(job: Job) -> list[str]:
    """One a prompt. A client's id may come twice; ours never does."""
    own = secrets.token_hex(4)
    return [f"{job.request_id}-{number}-{own}" for number in range(len(job.prompts))]


def _submission(job: Job, prompt_index: int, request_id: str, *, stream: bool) -> Submission:
    params, n = job.params, job.params.n
    if job.seeds:
        params = msgspec.structs.replace(params, seed=job.seeds[prompt_index])
    return Submission(
        request_id=request_id,
        prompt=job.prompts[prompt_index],
        params=params,
        priority=job.priority,
        deadline_s=job.deadline_s,
        cache_salt=job.cache_salt,
        resumed=job.resumed[prompt_index * n : (prompt_index + 1) * n],
        labels=job.route.labels if job.route is not None and prompt_index == 0 else None,
        stream=stream,
    )
