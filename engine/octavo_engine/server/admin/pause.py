"""Pause: nothing is generated and what comes waits, so that a trainer can change what it must."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from octavo_engine.errors import DeadlineExceeded

if TYPE_CHECKING:
    from octavo_engine.server.admission import RequestAdmission
    from octavo_engine.server.generation.inflight import InFlightRequests
    from octavo_engine.server.http.exchange import Exchange
    from octavo_engine.server.served_engine import ServedEngine


class PauseState:
    """Of one server. Memory stays taken; to give it back there is sleep."""

    def __init__(
        self,
        engine: ServedEngine,
        admission: RequestAdmission,
        running: InFlightRequests,
        timeout_s: float | None,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._running = running
        self._timeout_s = timeout_s
        self.is_on = False
        self._over = asyncio.Event()

    async def begin(self, *, abort: bool, clear_cache: bool) -> None:
        """Returns when nothing runs any more. A second call does no more."""
        if not self.is_on:
            self.is_on = True  # first, so that nothing comes in behind those that leave
            self._over = asyncio.Event()
        if abort:
            await self._running.stop_all()
        await self._admission.idle()
        if clear_cache and self.is_on:
            await self._engine.reset_prefix_cache()

    def end(self) -> None:
        """What waited goes on, in the order it came."""
        self.is_on = False
        self._over.set()

    async def hold(self, exchange: Exchange) -> None:
        """Until the pause is over. Raises DeadlineExceeded, ClientGone."""
        limit_s = self._timeout_s
        try:
            async with exchange.while_present(), asyncio.timeout(exchange.time_left_s(limit_s)):
                while self.is_on:
                    await self._over.wait()
        except TimeoutError:
            raise DeadlineExceeded("The request was not done in time: the server paused.") from None
