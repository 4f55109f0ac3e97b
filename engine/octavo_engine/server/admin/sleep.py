"""Sleep: work is refused and memory given back, until the server is woken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.server.http.errors import unavailable

if TYPE_CHECKING:
    from octavo_engine.server.service import Service


class SleepState:
    """Of one server. The KV cache's memory goes; weights' only where they lie on a device: mapped
    files the system drops by itself when memory is short."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.is_on = False

    def check(self) -> None:
        """Raises 503 while the server sleeps."""
        if self.is_on:
            raise unavailable(
                "sleeping", "The server sleeps; POST /wake_up wakes it.", retry_after_s=5
            )

    async def fall_asleep(self, *, abort: bool, level: int = 1) -> None:
        """Returns when nothing runs any more. A second call does no more."""
        service = self._service
        self.is_on = True  # first, so that nothing comes in behind those that leave
        if abort:
            await service.running.stop_all()
        await service.idle()
        if self.is_on:  # nobody woke it meanwhile
            await service.engine.sleep(on=True, level=level)

    async def wake_up(self) -> None:
        if self.is_on:
            await self._service.engine.sleep(on=False)
            self.is_on = False
