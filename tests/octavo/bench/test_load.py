"""Load meets servers that keep connections, and such as give them up without a word."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from octavo.bench import load
from octavo.http_client import ServerAddress

if TYPE_CHECKING:
    from collections.abc import Callable

EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": 1, "prompt_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"content-length: %d\r\n\r\n" % len(EVENTS)
) + EVENTS


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (lambda at: ANSWER if at < 2 else b"", ["", "", "", ""]),
        (lambda at: b"", ["the server closed the connection before it had answered"] * 4),
        (lambda at: ANSWER[:-20], ["the server closed the connection before it had answered"] * 4),
    ],
    ids=["a kept connection is given up", "no connection is answered", "answers break off"],
)
def test_only_a_kept_connection_that_was_given_up_is_tried_anew(
    answers: Callable[[int], bytes], expected: list[str]
) -> None:
    """`answers` says what a connection hears on its nth request; less than all of it is its end."""
    requests: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]  # within a task
        at = 0
        while (head := await _head(reader)) is not None:
            length = next(
                line for line in head.split(b"\r\n") if line.startswith(b"content-length")
            )
            await reader.readexactly(int(length.split(b":")[1]))
            requests.append(at)
            answer = answers(at)
            writer.write(answer)
            if answer != ANSWER:
                break
            at += 1
        writer.close()

    async def story() -> list[load.LoadResult]:
        async with await asyncio.start_server(serve, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            plan = load.LoadPlan(
                address=ServerAddress.parse(f"http://127.0.0.1:{port}"), model="m",
                prompts=[[1, 2]] * 4,
                output_len=1, max_concurrency=1,
            )  # fmt: skip
            results, _ = await load.run(plan)
            await asyncio.gather(*tasks)
            return results

    results = asyncio.run(story())
    assert [result.error for result in results] == expected
    assert len(requests) == (5 if not expected[0] else 4)


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
