"""One event a second to each open page: pools, engines, and the requests that ended since."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo_router.console.recent import Recent, row
from octavo_router.errors import Rejected
from octavo_router.http.messages import Inbound, Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry
    from octavo_router.flow.tenant import Tenant
    from octavo_router.gauges import DemandGauges
    from octavo_router.metrics import RouterMetrics
    from octavo_router.residency.api import ResidencyIndex
    from octavo_router.routing.models import Models

EVERY_S = 1.0
MAX_VIEWERS = 32


class Deployed(Protocol):
    def rows(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is shown. All of it is read, nothing changed."""

    registry: Registry
    models: Models
    metrics: RouterMetrics
    index: ResidencyIndex
    demand: DemandGauges
    authenticate: Callable[[str], Tenant]
    asks_for_keys: Callable[[], bool]
    deployments: Deployed | None = None  # where there are any
    replica: str = ""


class Live:
    """The handler of the page's stream. With API keys on, a tenant sees its own requests only."""

    def __init__(self, sources: Sources, *, every_s: float = EVERY_S) -> None:
        self._sources = sources
        self._every_s = every_s
        self._recent = Recent()
        self._num_viewers = 0
        self._ended = asyncio.Event()
        sources.metrics.on_counted = self._recent.take

    def close(self) -> None:
        """The router goes: pages receive a message to reconnect elsewhere."""
        self._ended.set()

    def __call__(self, request: Inbound) -> Reply:
        if self._num_viewers >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} console pages are already open on this router."
            raise Rejected(503, "too_many_viewers", message, retry_after_s=5.0)
        sources = self._sources
        tenant: str | None = None
        if sources.asks_for_keys():
            tenant = sources.authenticate(request.headers.get("authorization") or "").name
        headers = (("cache-control", "no-store"), ("x-accel-buffering", "no"))
        return Reply(200, self._events(tenant), "text/event-stream", headers)

    async def _events(self, tenant: str | None) -> AsyncIterator[bytes]:
        self._num_viewers += 1
        seen = 0
        try:
            while not self._ended.is_set():
                shown = self.shown(seen, tenant)
                seen = self._recent.number
                text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
                yield f"data: {text}\n\n".encode()
                try:
                    async with asyncio.timeout(self._every_s):
                        await self._ended.wait()
                except TimeoutError:
                    continue
        finally:
            self._num_viewers -= 1

    def shown(self, seen: int, tenant: str | None) -> dict[str, Any]:
        """How it stands, and the requests after number `seen`."""
        sources = self._sources
        metrics, registry = sources.metrics, sources.registry
        metrics.fold()
        now = metrics.now()
        names = sorted({*registry.pools, *metrics.pools})
        return {
            "at": round(time.time(), 3),
            "version": metrics.version,
            "replica": sources.replica,
            "models": [card.name for card in sources.models.cards()],
            "pools": [self._pool(name) for name in names],
            "endpoints": [self._endpoint(each) for each in registry.endpoints.values()],
            "tokens": self._tokens(),
            "num_requests": sum(metrics.requests.values()),
            "requests": [
                row(number, record, now=now)
                for number, record in self._recent.since(seen)
                if tenant is None or record.tenant == tenant
            ],
            "deployments": None if sources.deployments is None else sources.deployments.rows(),
        }

    def _tokens(self) -> dict[str, int]:
        """Of all models, by kind: prompt, cached, output."""
        totals: dict[str, int] = {}
        for (_, kind), count in self._sources.metrics.tokens.items():
            totals[kind] = totals.get(kind, 0) + count
        return totals

    def _pool(self, name: str) -> dict[str, Any]:
        sources = self._sources
        waiting = sources.demand(name)
        members = sources.registry.pool(name)
        return {
            "name": name,
            "ready": sum(each.state == "ready" for each in members),
            "engines": len(members),
            "held": waiting.held,
            "queued": waiting.queued,
            "in_flight": sum(each.num_requests for each in members),
        }

    def _endpoint(self, endpoint: Endpoint) -> dict[str, Any]:
        load, has_load = endpoint.load, endpoint.load_at is not None
        return {
            "id": endpoint.id,
            "name": endpoint.name,
            "url": endpoint.spec.address.url,
            "authority": endpoint.spec.address.authority,
            "pool": endpoint.pool,
            "revision": endpoint.spec.revision,
            "kind": endpoint.kind,
            "state": endpoint.state,
            # Bytes, rate and what is left say more than that it does not answer yet.
            "reason": str(endpoint.progress or endpoint.reason),
            "loading": endpoint.loading,
            "in_flight": endpoint.num_requests,
            "running": load.running if has_load else None,
            "waiting": load.waiting if has_load else None,
            "kv_usage": round(load.kv_usage, 4) if has_load else None,
            "prefixes": self._sources.index.num_keys(endpoint.slot) if endpoint.slot >= 0 else 0,
        }
