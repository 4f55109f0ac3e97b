"""How many of a request's prompts run at once: some of the engine's rows are left to others, so
that no request waits for a thousand prompts of one other."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from octavo_engine.server.service import Service

T = TypeVar("T")

ALONE = 7 / 8  # of the rows, while no other request is in flight: who comes finds one free
BESIDE_OTHERS = 1 / 2
ALONE_AFTER_S = 5.0  # without another request


class PromptShare:
    """`async with` around each prompt of one request, which is `width` sequences."""

    def __init__(self, service: Service, width: int) -> None:
        self._service = service
        self._width = width
        self._num_running = 0
        self._others_at = float("-inf")
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def of(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which is called once there is room for it."""
        async with self:
            return await work()

    async def __aenter__(self) -> None:
        if self._waiting or self._num_running >= self._most():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # its turn had come: the next one takes it
                    self._leave()
                raise
        else:
            self._num_running += 1

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._num_running -= 1
        while self._waiting and self._num_running < self._most():
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_running += 1
                turn.set_result(None)

    def _most(self) -> int:
        """One at least, however few rows there are."""
        now = time.monotonic()
        if self._service.admission.in_flight > 1:
            self._others_at = now
        is_alone = now - self._others_at > ALONE_AFTER_S
        rows = self._service.engine.config.max_num_seqs
        return max(1, int(rows * (ALONE if is_alone else BESIDE_OTHERS)) // self._width)
