"""The parts of a router that listen to engines, over real sockets and with short pauses."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_router.endpoints.registry import Registry
from octavo_router.http.deadlines import DeadlineTick
from octavo_router.metrics import RouterMetrics
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.signals.settings import SignalSettings
from octavo_router.signals.signals import Signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from octavo_router.endpoints.endpoint import Endpoint, EndpointSpec

FAST = SignalSettings(backoff_min_s=0.001, backoff_max_s=0.02, poll_s=0.005, models_s=0.01)


@dataclass
class Listening:
    registry: Registry
    index: PyResidencyIndex
    metrics: RouterMetrics
    signals: Signals

    def add(self, *specs: EndpointSpec) -> list[Endpoint]:
        """These are all endpoints now."""
        self.registry.replace("test", list(specs))
        return [self.registry.endpoints[spec.id] for spec in specs]


@asynccontextmanager
async def listening(
    settings: SignalSettings = FAST, *, rng: random.Random | None = None
) -> AsyncIterator[Listening]:
    index = PyResidencyIndex()
    registry = Registry(index)
    metrics = RouterMetrics()
    deadlines = DeadlineTick(asyncio.get_running_loop(), tick_s=0.002)
    signals = Signals(
        registry, index, metrics, settings, deadlines=deadlines, rng=rng or random.Random(7)
    )
    deadlines.start()
    try:
        async with signals:
            yield Listening(registry, index, metrics, signals)
    finally:
        deadlines.stop()
    assert len(deadlines) == 0, "whoever stops to wait says so"
