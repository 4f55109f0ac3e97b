"""Runs a batch: many requests at once, their answers in the order of the requests."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.batch.lines import Broken, answered, refused
from octavo_engine.server.loopback import JSON, post

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

    from octavo.batch.lines import Task

# How many requests may be begun before the oldest is done, in multiples of those at once: one slow
# answer does not hold the others back, and no more than these wait for it in memory.
_WINDOW = 4
_MAX_TRIES = 8  # while the server says 503 with Retry-After
_MULTIPART = "multipart/form-data; boundary=none"


@dataclass(slots=True)
class Tally:
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
    entries: Iterator[Task | Broken],
    write: Callable[[bytes], None],
    *,
    concurrency: int,
    note: Callable[[Tally], None],
) -> Tally:
    """`write` gets whole lines in order, `note` hears of each."""
    tally = Tally()
    places = asyncio.Semaphore(concurrency)

    async def work(entry: Task | Broken) -> _Answer:
        if isinstance(entry, Broken):
            return _Answer(refused(entry), False)
        async with places:
            return await _ask(app, entry)

    pending: deque[asyncio.Task[_Answer]] = deque()
    try:
        while True:
            while len(pending) < _WINDOW * concurrency:
                entry = next(entries, None)
                if entry is None:
                    break
                pending.append(asyncio.create_task(work(entry)))
            if not pending:
                return tally
            answer = await pending[0]
            pending.popleft()
            write(answer.line)
            tally.answered += answer.is_good
            tally.failed += not answer.is_good
            note(tally)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


async def _ask(app: ASGIApp, task: Task) -> _Answer:
    """A full queue and an engine that restarts are waited for."""
    content_type = _MULTIPART if task.url.startswith("/v1/audio/") else JSON
    for _ in range(_MAX_TRIES):
        reply = await post(app, task.url, task.body, content_type=content_type)
        if reply.status != 503:
            break
        await asyncio.sleep(float(reply.headers.get("retry-after", "1")))
    line = answered(task, reply.status, reply.headers.get("x-request-id", ""), reply.body)
    return _Answer(line, reply.status == 200)
