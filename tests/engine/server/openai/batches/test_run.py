"""Running a batch: order, how many at once, and patience with a server that is full."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from octavo_engine.server.openai.batches.lines import BadLine, BatchTask
from octavo_engine.server.openai.batches.run import BatchTally, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send


class App:
    """Answers in the order it is told to, and notes what it was asked."""

    def __init__(self, busy: int = 0) -> None:
        self.at_once = self.most_at_once = 0
        self.requested: list[bytes] = []
        self._busy = busy  # answers of 503 that come first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.requested.append(body)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        for _ in range(10 - int(body)):  # the first ones take longest
            await asyncio.sleep(0)
        self.at_once -= 1
        status = 200
        if self._busy:
            self._busy -= 1
            status = 503
        headers = [(b"retry-after", b"0"), (b"x-request-id", b"r")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def answers(
    app: App, entries: Sequence[BatchTask | BadLine], concurrency: int
) -> tuple[Any, BatchTally]:
    lines: list[bytes] = []
    tally = asyncio.run(
        run(app, iter(entries), lambda line, _: lines.append(line), concurrency=concurrency)
    )
    return [json.loads(line) for line in lines], tally


def tasks(count: int) -> list[BatchTask]:
    return [BatchTask(n, str(n), "/v1/completions", str(n).encode()) for n in range(count)]


def test_answers_come_in_the_order_of_the_requests():
    app = App()
    lines, tally = answers(app, tasks(9), concurrency=4)
    assert [line["custom_id"] for line in lines] == list("012345678")
    assert [line["response"]["body"] for line in lines] == list(range(9))
    assert (app.most_at_once, tally) == (4, BatchTally(answered=9))


def test_broken_lines_are_answered_in_their_place():
    first, second = tasks(2)
    lines, tally = answers(App(), [first, BadLine(2, None, "odd"), second], concurrency=1)
    assert [line["error"] is None for line in lines] == [True, False, True]
    assert (tally.answered, tally.failed, tally.done) == (2, 1, 3)


def test_a_full_server_is_asked_again():
    app = App(busy=3)
    lines, _ = answers(app, tasks(1), concurrency=1)
    assert len(app.requested) == 4
    assert lines[0]["response"]["status_code"] == 200


def test_patience_ends():
    lines, tally = answers(App(busy=100), tasks(1), concurrency=1)
    assert lines[0]["response"]["status_code"] == 503
    assert tally.failed == 1
