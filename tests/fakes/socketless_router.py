"""A whole data path without sockets or a clock: what is written can be read, time is set."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from random import Random
from typing import TYPE_CHECKING, Any, cast

from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.flow.admission import AdmissionGate
from octavo_router.flow.budget import RetryBudget, Throttle
from octavo_router.flow.keys import KeyTable
from octavo_router.flow.quarantine import DeathWatch
from octavo_router.http.client_connection import ClientConnection
from octavo_router.http.connection_settings import Shared
from octavo_router.http.deadlines import DeadlineTick
from octavo_router.http.network import Network, P
from octavo_router.metrics import RouterMetrics
from octavo_router.observer import MetricsObserver
from octavo_router.proxy.interfaces import ProxyParts
from octavo_router.proxy.service import Proxy
from octavo_router.proxy.upstreams import Upstreams
from octavo_router.routing.build import build_dispatcher
from octavo_router.routing.capacity import PoolCapacity
from octavo_router.routing.models import Models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo_router.config.settings import RouterConfig
    from octavo_router.endpoints.endpoint import Kind
    from octavo_router.http.deadlines import TimedWaiter
    from octavo_router.http.upstream_connection import UpstreamConnection
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.residency.native import HotPath
    from tests.fakes.clock import ManualClock


class Wire:
    """A transport: keeps what is written, tells its protocol when it is cut."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.written: list[bytes] = []
        self.is_cut = False
        self.is_broken = False
        self._protocol = protocol
        self._high = 2**30
        protocol.connection_made(cast("asyncio.Transport", self))

    def write(self, data: bytes) -> None:
        if self.is_broken:
            raise OSError("a mistake of ours, as far as anybody can tell")
        self.written.append(bytes(data))
        if len(data) > self._high:  # as transports do it: before this returns
            self._protocol.pause_writing()
            asyncio.get_running_loop().call_soon(self._protocol.resume_writing)

    def cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self._protocol.connection_lost(None)

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self.cut)

    close = write_eof = abort

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.is_cut

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 4000) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or self._high

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class InstantNetwork(Network):
    """Connects at once, in memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.wires: list[tuple[UpstreamConnection, Wire]] = []

    async def connect(self, factory: Callable[[], P], *where: object, **how: object) -> P:
        protocol = factory()
        self.wires.append((cast("UpstreamConnection", protocol), Wire(protocol)))
        return protocol


class SocketlessRouter:
    """Lives on a running loop; `clock` must stand in for time.monotonic before it is made."""

    def __init__(
        self,
        hot_path: HotPath,
        clock: ManualClock,
        *,
        kinds: Iterable[Kind],
        num_clients: int,
        config: RouterConfig,
    ) -> None:
        loop = asyncio.get_running_loop()
        index = hot_path.ResidencyIndex()
        self.registry = registry = Registry(index)
        self.records: list[RequestRecord] = []
        self.metrics = metrics = RouterMetrics(now=clock)
        metrics.on_counted = self.records.extend
        self.observer = MetricsObserver(metrics)
        self.dispatcher = build_dispatcher(
            config, registry, index, clock=clock, rng=Random(1), observer=self.observer,
            make_underway=hot_path.Underway,
        )  # fmt: skip
        self.throttle = Throttle(config.retry, clock, Random(2))
        rooms = PoolCapacity(registry, config.flow)
        self.gate = AdmissionGate(config.flow, KeyTable({}), rooms, clock, throttle=self.throttle)
        self.dispatcher.on_room = self.gate.wake
        self.dispatcher.on_result = self.throttle.note
        self.deadlines = DeadlineTick(loop)
        network = InstantNetwork(loop)
        self.wires = network.wires
        upstreams = Upstreams(config.timeouts, self.deadlines, loop, network=network)
        registry.subscribe(upstreams.changed)
        self.proxy = Proxy(
            ProxyParts(
                config=config, loop=loop, registry=registry, dispatcher=self.dispatcher,
                gate=self.gate, budget=RetryBudget(config.retry, clock),
                models=Models(registry, config.models), upstreams=upstreams, hot_path=hot_path,
                metrics=metrics, access_log=None,
            )
        )  # fmt: skip
        self.proxy._id_prefix = "req-"
        specs = [
            EndpointSpec(id=f"e{i}", address=Address("192.0.2.9", i), names=("m",), kind=kind)
            for i, kind in enumerate(kinds)
        ]
        registry.replace("test", specs)
        for endpoint in registry.endpoints.values():
            registry.report(endpoint, "ready")
        self.pools = [upstreams.of(endpoint).pool for endpoint in registry.endpoints.values()]
        shared = Shared(self.proxy, config.limits, config.timeouts, self.deadlines, loop)
        self.clients = [ClientConnection(shared) for _ in range(num_clients)]
        self.client_wires = [Wire(client) for client in self.clients]

    def renew_client(self, number: int) -> None:
        """Another one comes in its place."""
        client = ClientConnection(self.clients[number]._shared)
        self.clients[number] = client
        self.client_wires[number] = Wire(client)

    @property
    def busy(self) -> list[UpstreamConnection]:
        """Connections whose engines owe an answer, in the order in which they were opened."""
        return [connection for connection, _ in self.wires if connection.user is not None]

    def check_deadlines(self, now: float) -> None:
        """As `Deadlines.check`, whose order is nobody's; here it must be the same for twins."""
        waiting: list[TimedWaiter] = [*self.clients, *self.pools]
        for one in waiting:
            if one.deadline <= now:
                one.on_deadline(now)

    def wire_of(self, connection: UpstreamConnection) -> Wire:
        return next(wire for one, wire in self.wires if one is connection)

    def state(self) -> dict[str, Any]:
        """All that a request could change."""
        budget, health = self.proxy.budget, self.dispatcher.health
        assert health is not None
        return {
            "to clients": [wire.written for wire in self.client_wires],
            "to engines": [wire.written for _, wire in self.wires],
            "cut": [wire.is_cut for wire in (*self.client_wires, *(w for _, w in self.wires))],
            "connections": [
                (c._state, c.deadline, c.has_begun, c.owner is None, c.context is None)
                for c in self.clients
            ],
            "upstreams": [
                (c._state, c.user is None, c._num_interim, c.idle_since) for c, _ in self.wires
            ],
            "pools": [(pool.num_idle, pool.num_open, pool.deadline) for pool in self.pools],
            "endpoints": [
                {field.name: getattr(endpoint, field.name) for field in fields(endpoint)}
                for endpoint in self.registry.endpoints.values()
            ],
            "under way": (len(self.proxy.exchanges), self.dispatcher.underway.num_computing),
            "picks": self.dispatcher.num_picks,
            "looked at": list(self.dispatcher.decisions),
            "tenants": {n: t.in_flight for n, t in self.gate.tenants._anonymous.items()},
            "watched": {
                key: (known.since, known.copies, [(d.endpoint.id, d.at) for d in known.deaths])
                if isinstance(known, DeathWatch)
                else known
                for key, known in self.proxy.quarantine.watched.items()
            },
            "budget": (budget.num_active, budget.num_repeating),
            "windows": [
                {key: (w._first, w._second, w._parts) for key, w in windows.items()}
                for windows in (budget._tenants, self.throttle._pools)
            ],
            "rates": dict(self.dispatcher.token_rates._rates),
            "health": health._records,
            "placed": dict(self.observer._placed_at),
            "counts": [
                {(key[0].id, *key[1:]): count for key, count in counts.items()}
                for counts in (self.observer._picks, self.observer._ends)
            ],
            "records": [*self.records, *self.metrics._over],
        }
