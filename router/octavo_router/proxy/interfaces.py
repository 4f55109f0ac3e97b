"""What the proxy needs of the other parts, in the words that it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_router.flow.admin import AdminAccess

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection

    from octavo_router.adapters.fleet import AdapterFleet
    from octavo_router.config.settings import RetryConfig, RouterConfig, TimeoutsConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry
    from octavo_router.errors import Rejected
    from octavo_router.flow.admission import QueuedRequest, Ticket
    from octavo_router.flow.budget import RetryBudget
    from octavo_router.flow.quarantine import Quarantine
    from octavo_router.flow.tenant import Tenant
    from octavo_router.http.messages import Handler
    from octavo_router.metrics import PoolCounts
    from octavo_router.metrics.histogram import Histogram
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.proxy.account import RequestAccount
    from octavo_router.proxy.events import EventRelay
    from octavo_router.proxy.resume import StreamMemory
    from octavo_router.proxy.stream_form import StreamForm
    from octavo_router.proxy.upstreams import Upstreams
    from octavo_router.residency.api import FindUsage
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


class ExchangeHandle(Protocol):
    """A request in flight, to those that may end it."""

    def broke(self) -> None:
        """An error of the router itself ends it."""

    def shut_down(self, error: Rejected) -> None:
        """The router ends before the request does."""


class ExchangeHost(Protocol):
    """proxy.service.Proxy: what the requests in flight use together."""

    loop: asyncio.AbstractEventLoop
    dispatcher: Dispatching
    adapters: AdapterFleet | None
    upstreams: Upstreams
    quarantine: Quarantine
    budget: RetryBudget
    retry: RetryConfig
    timeouts: TimeoutsConfig
    find_usage: FindUsage

    def over(self, exchange: ExchangeHandle, account: RequestAccount) -> None: ...

    def note_loss(self, lease: Lease | None, problem: str) -> None: ...

    def note_stranger(self, lease: Lease | None) -> None: ...

    def is_end_of(self, lease: Lease | None) -> bool: ...

    def note_quarantine(self, request: RouteRequest, path: str, digest: str) -> None: ...

    def others(self, request: RouteRequest, ids: Collection[str]) -> list[Endpoint]: ...

    def hold(
        self, request: RouteRequest, account: RequestAccount, *, num_bytes: int
    ) -> QueuedRequest | None: ...

    def count_prompt(self, pool: str, outcome: str) -> None: ...

    def inter_token_latency(self, pool: str) -> Histogram: ...

    def new_memory(
        self, form: StreamForm, *, wants_usage: bool, keeps_lines: bool = False
    ) -> StreamMemory: ...

    def new_relay(self) -> EventRelay: ...

    def first_token_s(self, request: RouteRequest) -> float: ...

    def passed_over(
        self, request: RouteRequest, tried: list[Endpoint], *, was_answered: bool
    ) -> tuple[list[Endpoint], bool]: ...

    def progress(self, pool: str, waited_s: float) -> str: ...


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
    adapters: AdapterFleet | None = None
    routes: dict[tuple[str, str], Handler] = field(default_factory=dict)
