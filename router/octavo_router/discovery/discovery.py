"""Runs the sources of endpoints and puts what they find into the registry."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from octavo_router.discovery.source import Found, PoolRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from octavo_router.discovery.source import EndpointSource
    from octavo_router.endpoints.registry import Registry
    from octavo_router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

STUMBLE_PAUSE_S = 2.0


class Discovery:
    """Owns one task for each source. Use as `async with Discovery(...)`."""

    def __init__(
        self,
        sources: Sequence[EndpointSource],
        registry: Registry,
        metrics: RouterMetrics,
        *,
        on_pools: Callable[[dict[str, PoolRoute]], None] = lambda _: None,
    ) -> None:
        names = [source.name for source in sources]
        assert len(set(names)) == len(names), names
        self._sources = list(sources)
        self._registry = registry
        self._metrics = metrics
        self._on_pools = on_pools
        self._found: dict[str, Found] = {}
        self._heard = {name: asyncio.Event() for name in names}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._keep_running(source), name=f"discover {source.name}")
            for source in self._sources
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_synced(self) -> bool:
        """Every source has reported its set once: only then is an empty pool really empty."""
        return all(event.is_set() for event in self._heard.values())

    async def synced(self) -> None:
        for event in self._heard.values():
            await event.wait()

    @property
    def pools(self) -> dict[str, PoolRoute]:
        """Of all sources; the first that names a pool decides."""
        routes: dict[str, PoolRoute] = {}
        for source in self._sources:
            for route in self._found.get(source.name, Found()).pools:
                routes.setdefault(route.pool, route)
        return routes

    async def _keep_running(self, source: EndpointSource) -> None:
        while True:
            try:
                await source.run(lambda found: self._publish(source.name, found))
            except Exception:
                self._metrics.discovery(source.name).errors += 1
                logger.exception(
                    "Unhandled error in an endpoint source", extra={"source": source.name}
                )
            await asyncio.sleep(STUMBLE_PAUSE_S * (0.5 + random.random()))

    def _publish(self, name: str, found: Found) -> None:
        self._heard[name].set()
        before = self._found.get(name)
        if found == before:
            return
        self._found[name] = found
        changes = self._registry.replace(name, found.specs)
        self._metrics.discovery(name).updates += 1
        if before is None or found.pools != before.pools:
            self._on_pools(self.pools)
        logger.info(
            "Updated endpoints",
            extra={
                "source": name,
                "endpoints": len(found.specs),
                "added": len(changes.added),
                "removed": len(changes.removed),
                "updated": len(changes.updated),
            },
        )
