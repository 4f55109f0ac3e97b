"""Sleep: work is refused and memory given back, until the server is woken."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.server.admission import RequestAdmission
    from octavo_engine.server.generation.inflight import InFlightRequests
    from octavo_engine.server.served_engine import ServedEngine


class SleepState:
    """Of one server. The KV cache's memory goes; weights' only where they lie on a device: mapped
    files the system drops by itself when memory is short."""

    def __init__(
        self, engine: ServedEngine, admission: RequestAdmission, running: InFlightRequests
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._running = running

    @property
    def is_on(self) -> bool:
        return self._admission.is_sleeping

    async def fall_asleep(self, *, abort: bool, level: int = 1) -> None:
        """Returns when nothing runs any more. A second call does no more."""
        # First, so that nothing comes in behind those that leave.
        self._admission.is_sleeping = True
        if abort:
            await self._running.stop_all()
        await self._admission.idle()
        if self.is_on:  # it was not woken meanwhile
            await self._engine.sleep(on=True, level=level)

    async def wake_up(self) -> None:
        if self.is_on:
            await self._engine.sleep(on=False)
            self._admission.is_sleeping = False
