"""A crowd in a process of its own, and how long processes had to wait for a processor.

Thousands that are sent away and come again at once keep a process busy for seconds: were it the
engines' own, everybody else's answers would wait for that, and the router would seem to be slow.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from benchmarks.router.load import Crowd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from multiprocessing.connection import Connection

_NICE: Final = 10  # who is slow may wait for a processor, too
_LEAVING_S: Final = 10.0
_BACK_S: Final = 20.0  # for those who were sent away just now to come again


@dataclass(frozen=True, slots=True)
class CrowdSeen:
    """What a crowd saw until it left."""

    num_open: dict[str, int]  # clients that were there in the end, by kind
    num_ended: dict[str, int]  # that the router sent away
    num_failed: int  # connections that were not accepted


def joined(crowds: Sequence[CrowdSeen]) -> CrowdSeen:
    """Of all of them together."""
    num_open: Counter[str] = Counter()
    num_ended: Counter[str] = Counter()
    for crowd in crowds:
        num_open += Counter(crowd.num_open)
        num_ended += Counter(crowd.num_ended)
    return CrowdSeen(dict(num_open), dict(num_ended), sum(crowd.num_failed for crowd in crowds))


@asynccontextmanager
async def crowding(
    port: int, source: str, **numbers: int
) -> AsyncIterator[Callable[[], Awaitable[CrowdSeen]]]:
    """Slow clients, all of them there. What is given makes them leave and tells what they saw.

    Their address is `source`: one alone has too few ports for ten thousand that come again.
    """
    ours, theirs = Pipe()
    process = get_context("spawn").Process(
        target=_live, args=(port, source, numbers, theirs), daemon=True
    )
    process.start()
    theirs.close()  # so that its end is heard here

    async def leave() -> CrowdSeen:
        ours.send(None)
        seen: CrowdSeen = await asyncio.to_thread(ours.recv)
        return seen

    try:
        await asyncio.to_thread(ours.recv)
        yield leave
    finally:
        ours.close()
        await asyncio.to_thread(process.join, _LEAVING_S)
        process.kill()


def _live(port: int, source: str, numbers: dict[str, int], pipe: Connection) -> None:
    os.nice(_NICE)
    uvloop.run(_crowd(port, source, numbers, pipe))


async def _crowd(port: int, source: str, numbers: dict[str, int], pipe: Connection) -> None:
    crowd = Crowd(port, source)
    await crowd.gather(**numbers)
    pipe.send(None)
    try:
        await asyncio.to_thread(pipe.recv)
    except EOFError:  # nobody wants them any more
        return
    until = time.monotonic() + _BACK_S
    while sum(crowd.num_open.values()) < sum(numbers.values()) and time.monotonic() < until:  # noqa: ASYNC110  # facts have no events
        await asyncio.sleep(0.01)
    num_open = crowd.num_open
    await crowd.leave()
    pipe.send(CrowdSeen(num_open, dict(crowd.num_ended), crowd.num_failed))


def waited_s(pid: int) -> float:
    """How long its main thread was ready to run and had no processor; 0 where nobody tells."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
