"""What the proxy needs of the other parts, in the words that it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_router.flow.admin import AdminAccess

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection

    from octavo_router.config.settings import RouterConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry
    from octavo_router.flow.admission import QueuedRequest, Ticket
    from octavo_router.flow.budget import RetryBudget
    from octavo_router.flow.tenant import Tenant
    from octavo_router.http.messages import Handler
    from octavo_router.metrics import PoolCounts
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.proxy.upstreams import Upstreams
    from octavo_router.residency.native import HotPath
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.models import Models
    from octavo_router.routing.request import RouteRequest
    from octavo_router.tracing import RouterTracing


class Dispatching(Protocol):
    """routing.Dispatcher."""

    def place(
        self, request: RouteRequest, *, exclude: Collection[Endpoint] = ()
    ) -> Lease | None: ...

    def pairs(self, pool: str) -> bool: ...

    def wants_prompt(self, lease: Lease) -> bool: ...

    def place_prompt(self, lease: Lease) -> Lease | None: ...


class Admission(Protocol):
    """flow.Gate."""

    def authenticate(self, authorization: str = "", tenant_hint: str = "") -> Tenant: ...

    def admit(
        self, request: RouteRequest, tenant: Tenant, *, num_bytes: int = 0, deadline: float = ...
    ) -> Ticket | QueuedRequest: ...

    def wait_again(
        self, request: RouteRequest, ticket: Ticket, *, num_bytes: int = 0, deadline: float = ...
    ) -> QueuedRequest: ...


class ProxyMetrics(Protocol):
    def pool(self, name: str, /) -> PoolCounts: ...

    def finish(self, record: RequestRecord) -> None: ...


class RequestLog(Protocol):
    takes_all: bool  # else it takes errors, or nothing

    def write(self, record: RequestRecord) -> None: ...


@dataclass(slots=True, kw_only=True)
class ProxyParts:
    """Everything that a `Proxy` is made of."""

    config: RouterConfig
    loop: asyncio.AbstractEventLoop
    registry: Registry
    dispatcher: Dispatching
    gate: Admission
    budget: RetryBudget
    models: Models
    upstreams: Upstreams
    hot_path: HotPath
    metrics: ProxyMetrics
    access_log: RequestLog | None
    admin: AdminAccess = field(default_factory=AdminAccess)
    tracing: RouterTracing | None = None
    routes: dict[tuple[str, str], Handler] = field(default_factory=dict)
