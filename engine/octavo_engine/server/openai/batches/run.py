"""Runs a batch: many requests at once, their answers in the order of the requests."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.server.http.loopback import JSON, post
from octavo_engine.server.openai.batches.lines import BadLine, answered, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

    from octavo_engine.server.openai.batches.lines import BatchTask

# How many requests may be begun before the oldest is done, in multiples of those at once: one slow
# answer does not hold the others back, and no more than these wait for it in memory.
_WINDOW = 4
MAX_TRIES = 8  # while the server says 503 with Retry-After
_MULTIPART = "multipart/form-data; boundary=none"


@dataclass(slots=True)
class BatchTally:
    """How far a batch is."""

    answered: int = 0  # with status 200
    failed: int = 0

    @property
    def done(self) -> int:
        return self.answered + self.failed


@dataclass(frozen=True, slots=True)
class _Answer:
    line: bytes
    is_good: bool


async def run(
    app: ASGIApp,
    entries: Iterator[BatchTask | BadLine],
    write: Callable[[bytes, bool], None],
    *,
    concurrency: int,
    note: Callable[[BatchTally], None] = lambda tally: None,
    places: asyncio.Semaphore | None = None,
    max_tries: int | None = MAX_TRIES,
    is_background: bool = False,
) -> BatchTally:
    """`write` gets whole lines in order and whether they are good, `note` is called for each.

    Batches that run together share their `places`. Without `max_tries` patience has no end. In
    the background they get only what other requests leave.
    """
    tally = BatchTally()
    turn = places or asyncio.Semaphore(concurrency)

    async def work(entry: BatchTask | BadLine) -> _Answer:
        if isinstance(entry, BadLine):
            return _Answer(refused(entry), False)
        async with turn:
            return await _ask(app, entry, max_tries, is_background=is_background)

    pending: deque[asyncio.Task[_Answer]] = deque()

    def put_done() -> None:
        while pending and pending[0].done():
            answer = pending.popleft().result()
            write(answer.line, answer.is_good)
            tally.answered += answer.is_good
            tally.failed += not answer.is_good
            note(tally)

    try:
        while True:
            while len(pending) < _WINDOW * concurrency:
                entry = next(entries, None)
                if entry is None:
                    break
                pending.append(asyncio.create_task(work(entry)))
            if not pending:
                return tally
            await asyncio.wait([pending[0]])  # a cancel ends all at once, not this one first
            put_done()
    finally:
        put_done()  # where this is cancelled: nothing that is done is lost
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


async def _ask(
    app: ASGIApp, task: BatchTask, max_tries: int | None, *, is_background: bool
) -> _Answer:
    """A full queue and an engine that restarts are waited for."""
    content_type = _MULTIPART if task.url.startswith("/v1/audio/") else JSON
    for _ in itertools.count() if max_tries is None else range(max_tries):
        reply = await post(
            app, task.url, task.body, content_type=content_type, is_background=is_background
        )
        if reply.status != 503:
            break
        await asyncio.sleep(float(reply.headers.get("retry-after", "1")))
    line = answered(task, reply.status, reply.headers.get("x-request-id", ""), reply.body)
    return _Answer(line, reply.status == 200)
