"""Waiting for facts that sockets and tasks bring about."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any


async def until(fact: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Looks often; the deadline only ends tests that have gone wrong."""
    async with asyncio.timeout(timeout_s):
        while not fact():  # noqa: ASYNC110  # what makes it true tells nobody
            await asyncio.sleep(0.001)


def run(story: Coroutine[Any, Any, None]) -> None:
    """A test's story, with a deadline."""
    asyncio.run(asyncio.wait_for(story, 120))
