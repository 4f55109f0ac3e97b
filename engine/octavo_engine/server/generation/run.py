"""Runs a job's prompts through the engine; their outputs go to one sink."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.core.text.output_stream import OutputSink
from octavo_engine.core.text.submission import Submission
from octavo_engine.core.validate import tokenized_bad_words
from octavo_engine.errors import (
    DeadlineExceeded,
    RequestError,
)
from octavo_engine.server.generation.beam_search import beam_search
from octavo_engine.server.generation.gather import all_of
from octavo_engine.server.generation.inflight import names_of
from octavo_engine.server.generation.job import Job, JobOutput
from octavo_engine.server.generation.prompt_share import PromptShare
from octavo_engine.server.generation.timing import RequestTiming
from octavo_engine.server.http.request_log import OutputLog, log_request
from octavo_engine.server.routers.route_labels import Answers

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.core.beam_search import BeamSearchParams
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.server.service import Service

    Note = Callable[[int, RequestOutput], None]


async def run_job(service: Service, job: Job, sink: OutputSink[JobOutput], *, stream: bool) -> None:
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


async def collect_outputs(service: Service, job: Job) -> list[JobOutput]:
    """The outputs of a request that is not streamed. Raises RequestError."""
    outputs: list[JobOutput] = []

    async def put(output: JobOutput) -> None:
        outputs.append(output)

    await run_job(service, job, OutputSink(put), stream=False)
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
        service.model.labeller.settle(job.route, answers)


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
        adapter=job.adapter,
        media=job.media if prompt_index == 0 else None,
        resumed=job.resumed[prompt_index * n : (prompt_index + 1) * n],
        labels=job.route.labels if job.route is not None and prompt_index == 0 else None,
        stream=stream,
        group=job.group,
        can_move=job.can_move,
        kv_source=job.kv_source,
        retention=job.retention,
        is_prefetch=job.is_prefetch,
    )
