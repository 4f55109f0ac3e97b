"""A router's data path on a real port, in front of upstreams whose state the test decides."""

from __future__ import annotations

import asyncio
import functools
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import uvloop

from octavo_router.config.settings import RouterConfig
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.flow.admission import AdmissionGate
from octavo_router.flow.budget import RetryBudget
from octavo_router.flow.keys import KeyTable
from octavo_router.http.client_connection import ClientConnection
from octavo_router.http.connection_settings import Shared
from octavo_router.http.deadlines import DeadlineTick
from octavo_router.http.network import Network
from octavo_router.http.request_head import HeadRules
from octavo_router.http.sockets import open_listener
from octavo_router.metrics import RouterMetrics
from octavo_router.proxy.exchange import ProxyExchange
from octavo_router.proxy.interfaces import ProxyParts
from octavo_router.proxy.paths import UPLOADS
from octavo_router.proxy.service import Proxy
from octavo_router.proxy.upstreams import Upstreams
from octavo_router.residency import native
from octavo_router.routing.capacity import PoolCapacity
from octavo_router.routing.dispatcher import Dispatcher
from octavo_router.routing.models import Models
from octavo_router.routing.policies import Policies
from octavo_router.routing.prefix_load import PrefixLoad

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from octavo_router.endpoints.endpoint import Endpoint, Kind
    from octavo_router.endpoints.registry import Change
    from octavo_router.http.messages import Handler
    from octavo_router.http.upstream_connection import Loss, UpstreamConnection, User
    from octavo_router.http.upstream_pool import UpstreamPool
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.residency.api import Underway
    from octavo_router.routing.request import RouteRequest

PATIENCE_S = 60.0
OPENING_S = 0.2  # an engine that does not accept within it is the story's point


def on_loop(
    test: Callable[..., Coroutine[Any, Any, None]],
    *,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Callable[..., None]:
    """An async test, on the loop that the router runs on, with an end in any case."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(bounded())

    return run


KEEPS_CONNECTIONS = False  # to engines, from before the first request; tests set it


class InOrder:
    """A policy that takes the first candidate, so that a test knows who is next."""

    name = "in-order"
    reason = "first"
    places_adapters = False

    def pick(
        self,
        request: RouteRequest,
        endpoints: Sequence[Endpoint],
        matched: Sequence[int],
        *more: object,
    ) -> int:
        return 0

    def explain(
        self, request: RouteRequest, endpoints: Sequence[Endpoint], matched: Sequence[int]
    ) -> list[dict[str, float]]:
        return [{} for _ in endpoints]


def in_order(registry: Registry, underway: Underway) -> PrefixLoad:
    """The same with the default policy: the first is fastest."""

    def set_speeds(change: Change) -> None:
        for number, endpoint in enumerate(registry.endpoints.values()):
            endpoint.token_s = 10.0 ** (9 * number - 12)

    registry.subscribe(set_speeds)
    return PrefixLoad(underway, balance_slack=10**6)


class Opening:
    """Opens a connection for the next request to find."""

    def __init__(self, pool: UpstreamPool) -> None:
        self.is_over = asyncio.Event()
        self._pool = pool

    def on_connected(self, connection: UpstreamConnection) -> None:
        self._pool.give_back(connection)
        self.is_over.set()

    def on_lost(self, loss: Loss, problem: str) -> None:
        self.is_over.set()


@dataclass
class Rig:
    """What a test looks at."""

    port: int
    proxy: Proxy
    registry: Registry
    shared: Shared
    gate: AdmissionGate
    upstreams: Upstreams
    metrics: RouterMetrics
    records: list[RequestRecord]
    deadlines: DeadlineTick

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self.registry.endpoints.values())

    async def until(self, fact: Callable[[], bool]) -> None:
        """Waits for a fact that the network brings about."""
        while not fact():  # noqa: ASYNC110  # facts have no events
            await asyncio.sleep(0.001)

    def later(self, seconds: float) -> None:
        """Whatever is due by then is due now: time-outs are met without waiting for them."""
        self.deadlines.check(time.monotonic() + seconds)

    async def has_head(self) -> None:
        """The head of a response has arrived, and its body is awaited."""
        await self.until(
            lambda: any(
                isinstance(one, ProxyExchange) and one._state.is_receiving
                for one in self.proxy.exchanges
            )
        )

    async def given_up(self, endpoint: Endpoint, *, after_s: float) -> None:
        """So much time passes without a byte that the attempt there ends."""
        await self.until(lambda: endpoint.in_flight > 0)
        others = [one for one in self.endpoints if one is not endpoint]
        while endpoint.in_flight:
            self.later(after_s)
            await asyncio.sleep(0.01)  # what is on its way arrives before the time goes on
            await self.until(lambda: not any(one.in_flight for one in others))

    async def settled(self) -> None:
        """Nothing is left of any request."""
        await self.until(lambda: not self.proxy.exchanges)
        for endpoint in self.endpoints:
            assert endpoint.in_flight == 0, endpoint
            assert endpoint.pending_tokens == 0, endpoint
        assert self.proxy.budget.num_active == 0
        assert self.proxy.budget.num_repeating == 0


class Records:
    takes_all = True

    def __init__(self, metrics: RouterMetrics) -> None:
        self.all: list[RequestRecord] = []
        self._metrics = metrics

    def write(self, record: RequestRecord) -> None:
        self.all.append(record)


def fast_config(**sections: dict[str, Any]) -> RouterConfig:
    """The defaults, with these fields of these sections."""
    config = RouterConfig()
    changes = {name: replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return replace(config, **changes)


@asynccontextmanager
async def routing_to(
    *ports: int,
    config: RouterConfig | None = None,
    kind: Kind = "openai",
    routes: dict[tuple[str, str], Handler] | None = None,
    table: KeyTable | None = None,
    tick_s: float = 0.01,
) -> AsyncIterator[Rig]:
    loop = asyncio.get_running_loop()
    config = config or RouterConfig()
    hot_path = native.load()
    index, underway = hot_path.ResidencyIndex(), hot_path.Underway()
    registry = Registry(index)
    registry.replace(
        "test",
        [
            EndpointSpec(id=f"e{i}", address=Address("127.0.0.1", port), names=("m",), kind=kind)
            for i, port in enumerate(ports)
        ],
    )
    deadlines = DeadlineTick(loop, tick_s=tick_s)
    deadlines.start()
    dispatcher = Dispatcher(
        registry, index, Policies(InOrder(), {}), underway=underway, clock=time.monotonic
    )
    if KEEPS_CONNECTIONS:
        dispatcher.policies = Policies(in_order(registry, underway))
    network = Network(loop)
    upstreams = Upstreams(config.timeouts, deadlines, loop, network=network)
    registry.subscribe(upstreams.changed)
    for endpoint in registry.endpoints.values():
        registry.report(endpoint, "ready")
    gate = AdmissionGate(
        config.flow, table or KeyTable({}), PoolCapacity(registry, config.flow), time.monotonic
    )
    dispatcher.on_room = gate.wake
    metrics = RouterMetrics()
    records = Records(metrics)
    proxy = Proxy(
        ProxyParts(
            config=config,
            loop=loop,
            registry=registry,
            dispatcher=dispatcher,
            gate=gate,
            budget=RetryBudget(config.retry, time.monotonic),
            models=Models(registry, config.models),
            upstreams=upstreams,
            hot_path=hot_path,
            metrics=metrics,
            access_log=records,
            routes=routes or {},
        )
    )
    rules = HeadRules(uploads=UPLOADS)
    shared = Shared(proxy, config.limits, config.timeouts, deadlines, loop, rules=rules)
    listener = open_listener("127.0.0.1", 0)
    server = await network.listen(lambda: ClientConnection(shared), listener)
    port = server.sockets[0].getsockname()[1]
    if KEEPS_CONNECTIONS:  # what a first request would leave behind
        _ = proxy._models.adapter_contents
        registry.candidates("default")
        proxy._models.resolve("m")
        for endpoint in registry.endpoints.values():
            pool = upstreams.of(endpoint).pool
            opening = Opening(pool)
            task = pool.connect(cast("User", opening))
            with suppress(TimeoutError):
                await asyncio.wait_for(opening.is_over.wait(), OPENING_S)
            task.cancel()
    try:
        yield Rig(port, proxy, registry, shared, gate, upstreams, metrics, records.all, deadlines)
    finally:
        server.close()
        for connection in list(shared.connections):
            connection.abort()
        upstreams.close()
        deadlines.stop()
        await asyncio.sleep(0)
