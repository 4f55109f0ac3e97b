"""The router as a whole: every part made from the configuration, started, stopped, reconfigured."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

from octavo_common.clock_watch import ClockWatch
from octavo_common.logs import change_level
from octavo_common.loop_watch import LoopWatch
from octavo_engine.protocol.endpoints import STATE_PATH
from octavo_router.access_log import AccessLog
from octavo_router.adapters.fleet import AdapterFleet
from octavo_router.admin.routes import OwnRoutes, is_for_admins
from octavo_router.admin.state import StateReporter
from octavo_router.config.show import differences
from octavo_router.console.build import make_console
from octavo_router.discovery.build import make_sources
from octavo_router.discovery.discovery import Discovery
from octavo_router.discovery.pool_config import discovered_models, discovered_pools, foreign_claims
from octavo_router.docs.routes import DocsRoutes
from octavo_router.endpoints.registry import Registry
from octavo_router.errors import ConfigInvalid
from octavo_router.flow.admin import AdminAccess
from octavo_router.flow.admission import AdmissionGate
from octavo_router.flow.budget import RetryBudget, Throttle
from octavo_router.flow.keys_file import KeysFile
from octavo_router.flow.memory import Level, MemoryWatch
from octavo_router.gauges import make_gauges, make_shadow_gauges, make_side_counters
from octavo_router.http.deadlines import DeadlineTick
from octavo_router.http.network import Network
from octavo_router.http.tls import ClientTls
from octavo_router.metrics import RouterMetrics
from octavo_router.observer import MetricsObserver
from octavo_router.proxy.adapter_calls import EngineAdapterCalls
from octavo_router.proxy.canary import Canaries
from octavo_router.proxy.interfaces import ProxyParts
from octavo_router.proxy.service import Proxy
from octavo_router.proxy.upstreams import Upstreams
from octavo_router.residency import native
from octavo_router.routing.build import build_dispatcher, policy_names, reconfigure
from octavo_router.routing.capacity import PoolCapacity
from octavo_router.routing.models import Models
from octavo_router.signals.settings import SignalSettings
from octavo_router.signals.signals import Signals
from octavo_router.tracing import make_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from octavo_router.access_log import Mode
    from octavo_router.config.settings import RouterConfig
    from octavo_router.console.live import Live
    from octavo_router.discovery.source import PoolRoute
    from octavo_router.discovery.upstreams import ConfiguredUpstreams as StaticUpstreams
    from octavo_router.epp.server import EppServer
    from octavo_router.flow.keys import KeyTable

logger = logging.getLogger("octavo.router")

_LOOP_TICK_S = 0.1
_LOOP_DUMP_S = 5.0  # of standing still: every thread's stack is written down

_TICK_S = 1.0  # of health, prices, key files, the wall clock
_QUEUE_TICK_S = 0.25
_SYNC_S = 5.0  # to hear from every source and engine before the router calls itself ready


class App:
    """Use as `async with App(config)`. `load` reads the configuration again."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        load: Callable[[], RouterConfig] | None = None,
        environment: Mapping[str, str] = os.environ,
        rng: random.Random | None = None,
    ) -> None:
        clock = time.monotonic
        loop = asyncio.get_running_loop()
        self.config = config
        self.is_draining = False
        self.picker: EppServer | None = None
        # A server's, for what it knows of connections.
        self.on_applied: Callable[[RouterConfig], None] = lambda config: None
        self.on_keys: Callable[[], None] = lambda: None  # some may be gone
        self.awaited_bytes: Callable[[], int] = lambda: 0  # of bodies
        self._load = load
        self._environment = environment
        self._rng = rng or random.Random(config.routing.seed or None)
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._pool_routes: dict[str, PoolRoute] = {}

        hot_path = native.load()
        if hot_path.problem:
            logger.warning("Runs without its compiled hot path", extra={"why": hot_path.problem})
        self._scan = hot_path.scan
        index = hot_path.ResidencyIndex(max_keys_per_slot=config.routing.max_keys_per_endpoint)
        self.metrics = RouterMetrics()
        self.registry = Registry(index)
        self.dispatcher = build_dispatcher(
            config, self.registry, index,
            clock=clock, rng=self._rng, observer=MetricsObserver(self.metrics),
            make_underway=hot_path.Underway,
        )  # fmt: skip
        self.models = Models(self.registry, config.models, config.routing.pools)
        self._rooms = PoolCapacity(self.registry, config.flow)
        self._keys_file = KeysFile(config.flow, environment)
        table = self._keys_file.load()
        self._throttle = Throttle(config.retry, clock, self._rng)
        self.gate = AdmissionGate(config.flow, table, self._rooms, clock, throttle=self._throttle)
        self.dispatcher.on_room = self.gate.wake
        self.dispatcher.on_result = self._throttle.note
        self.metrics.add_source(make_gauges(self.registry, index, self.gate.demand, now=clock))
        self.metrics.add_source(make_shadow_gauges(lambda: self.dispatcher.shadows))
        self.metrics.add_source(make_side_counters(self.dispatcher.sides))
        self.deadlines = DeadlineTick(loop)
        self._tls = self._engine_tls()
        engine_key = config.discovery.engine_key
        self.network = Network(loop)
        self.upstreams = Upstreams(
            config.timeouts, self.deadlines, loop, network=self.network,
            tls=self._tls, engine_key=engine_key, passes_keys=not table.is_required,
        )  # fmt: skip
        self.registry.subscribe(self.upstreams.changed)
        self._adapter_calls = EngineAdapterCalls(self.upstreams)
        self.adapters = AdapterFleet(
            self.registry, self._adapter_calls, clock=clock, counts_of=self.metrics.pool
        )
        self._adapter_calls.fleet = self.adapters
        self.adapters.configure(config.routing.pools)
        self.dispatcher.on_adapter_idle = self.adapters.idle
        self.admin = AdminAccess(config.server.admin_key, is_trusted=self.gate.tenants.is_trusted)
        self.own = OwnRoutes(self.models, self.metrics, self.admin, started_at=time.time())
        self.admin_routes = self.own.table()
        self.admin_routes["GET", STATE_PATH] = self._state = StateReporter(
            self.registry, self.gate.demand, self.metrics,
            replica=config.server.replica or socket.gethostname(),
            admin=self.admin,
            token=config.server.state_token,
            is_open=config.server.open_state,
            known_pools=lambda: self._pool_routes,
            adapters=self.adapters.states,
            prompt_tokens=self.dispatcher.prompt_tokens,
        )  # fmt: skip
        if config.server.debug_endpoints:
            from octavo_router.admin.debug import Debug
            from octavo_router.admin.request_reader import RequestReader

            self.admin_routes |= Debug(
                self.dispatcher,
                index,
                config=lambda: self.config,
                understand=RequestReader(hot_path.scan, self.models),
                admin=self.admin,
                now=clock,
            ).routes()
        self.routes = self.admin_routes.copy()
        if config.server.admin_port:
            for key in [key for key in self.routes if is_for_admins(key[1])]:
                del self.routes[key]
        self._console: Live | None = None
        if config.server.console:
            self._console, pages = make_console(
                config, self.registry, self.models, self.metrics, index, self.gate, environment
            )
            self.routes |= pages
            docs = DocsRoutes({path for _, path in self.routes}, lambda: self.metrics.version)
            self.routes |= docs.table()
        self._tracing = make_tracing(
            config.tracing.endpoint,
            sample_ratio=config.tracing.sample_ratio,
            instance=config.server.replica or socket.gethostname(),
        )
        self.access_log = AccessLog(
            config.server.access_log, config.server.log_format  # type: ignore[arg-type]  # checked there
        )  # fmt: skip
        self.proxy = Proxy(
            ProxyParts(
                config=config,
                loop=loop,
                registry=self.registry,
                dispatcher=self.dispatcher,
                gate=self.gate,
                budget=RetryBudget(config.retry, clock),
                models=self.models,
                upstreams=self.upstreams,
                hot_path=hot_path,
                metrics=self.metrics,
                access_log=self.access_log,
                admin=self.admin,
                routes=self.routes,
                tracing=self._tracing,
                adapters=self.adapters,
            )
        )
        self._memory = MemoryWatch(
            config.limits.max_memory_bytes,
            self._memory_changed,
            num_processes=config.server.workers,
        )
        self.clock = ClockWatch()
        self._canaries = Canaries(self.dispatcher, self.upstreams, config)
        self._signals = Signals(
            self.registry, index, self.metrics,
            SignalSettings(
                api_key=engine_key, tls=self._tls, poll_s=config.discovery.poll_interval_s
            ),
            deadlines=self.deadlines, rng=self._rng,
        )  # fmt: skip
        sources = make_sources(config.discovery, self.metrics, environment)
        self._static = cast("StaticUpstreams", sources[0])
        self._discovery = Discovery(
            sources,
            self.registry,
            self.metrics,
            on_pools=self._take_pool_routes,
        )

    async def __aenter__(self) -> Self:
        self.deadlines.start()
        loop_watch = LoopWatch(
            logging.getLogger("octavo.router.loop"),
            tick_s=_LOOP_TICK_S,
            dump_s=_LOOP_DUMP_S,
            on_lag=self.metrics.note_loop_lag,
        )
        await self._stack.enter_async_context(loop_watch)
        await self._stack.enter_async_context(self._signals)
        await self._stack.enter_async_context(self._discovery)
        if self.config.epp.enabled:
            await self._open_picker()
        for work in (self._tick(), self._tick_queue(), self._become_ready()):
            self._tasks.append(asyncio.create_task(work))
        self._tasks.append(asyncio.create_task(asyncio.to_thread(self._prepare_scrapes)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._canaries.stop()
        self._adapter_calls.stop()
        self.proxy.mirrors.stop()
        await self._stack.aclose()
        self.upstreams.close()
        self.deadlines.stop()
        await self.access_log.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await asyncio.sleep(0)  # what was closed just now is notified

    async def _open_picker(self) -> None:
        """Last, so that it ends first: its streams may finish while all else still runs."""
        from octavo_router.epp.build import make_server  # only whom a gateway asks needs these
        from octavo_router.epp.picker import PickerParts

        parts = PickerParts(
            settings=lambda: self.config,
            registry=self.registry,
            dispatcher=self.dispatcher,
            gate=self.gate,
            models=self.models,
            scan=self._scan,
            metrics=self.metrics,
            access_log=self.access_log,
            is_ready=lambda: not self.own.not_ready,
            quarantine=self.proxy.quarantine,
            note_quarantine=self.proxy.note_quarantine,
            admin=self.admin,
            adapters=self.adapters,
        )
        try:
            self.picker = await self._stack.enter_async_context(make_server(parts))
        except ConfigInvalid:
            await self._stack.aclose()
            self.deadlines.stop()
            raise

    def begin_draining(self) -> None:
        """From now on nobody should send new requests here."""
        self.is_draining = True
        self.own.not_ready = "draining"
        if self._console is not None:
            self._console.close()

    async def reload(self) -> list[str]:
        """Takes what changed in the configuration. Raises ConfigInvalid, and keeps the old one."""
        if self._load is None:
            return []
        try:
            config = self._load()
            changes = differences(self.config, config)
            self.apply(config)
        except ConfigInvalid:
            self.metrics.process.config_reloads.add("failed")
            raise
        for change in changes:
            if change.needs_restart:
                logger.warning("Needs a restart", extra={"setting": change.path})
        return [change.path for change in changes]

    def apply(self, config: RouterConfig) -> None:
        keys_file = KeysFile(config.flow, self._environment)
        table = keys_file.load()
        merged = self._merged(config)
        self._static.replace(config.discovery.upstreams)
        try:
            reconfigure(self.dispatcher, merged, self._rng)
        except ConfigInvalid:
            self._static.replace(self.config.discovery.upstreams)
            raise
        # Nothing below can fail: a bad configuration has changed nothing.
        if config.server.log_level != self.config.server.log_level:
            change_level(config.server.log_level)
        self.config = config
        self._keys_file = keys_file
        self.models.replace(merged.models, self._claims(), merged.routing.pools)
        self.adapters.configure(merged.routing.pools)
        self._rooms.config = self.gate.config = config.flow
        self._replace_keys(table)
        self._throttle.config = config.retry
        self._memory.limit_bytes = config.limits.max_memory_bytes
        self.proxy.reconfigure(config)
        self._canaries.config = config
        self.upstreams.reconfigure(config.timeouts, passes_keys=not table.is_required)
        server = config.server
        self.admin.replace_key(server.admin_key)
        self._state.change_access(token=server.state_token, is_open=server.open_state)
        self.access_log.change(cast("Mode", config.server.access_log))
        self.on_applied(config)
        self.metrics.process.config_reloads.add("ok")

    def _replace_keys(self, table: KeyTable) -> None:
        were_required = self.gate.tenants.table.is_required
        self.gate.replace_keys(table)
        if were_required:
            self.on_keys()

    def _engine_tls(self) -> ClientTls:
        discovery = self.config.discovery
        tls = ClientTls(discovery.tls_ca, discovery.tls_cert, discovery.tls_key)
        is_needed = discovery.tls_ca or discovery.tls_cert or discovery.file or any(
            upstream.url.startswith("https:") for upstream in discovery.upstreams
        )  # fmt: skip
        if is_needed:  # else it waits: to read the system's authorities takes longer than all else
            _ = tls.context
        return tls

    # -- what the owners of pools want

    def _take_pool_routes(self, routes: dict[str, PoolRoute]) -> None:
        self._pool_routes = routes
        self.gate.holds = {
            name: route.hold_s for name, route in routes.items() if route.hold_s is not None
        }
        merged = self._merged(self.config)
        try:
            reconfigure(self.dispatcher, merged, self._rng)
        except ConfigInvalid as error:
            logger.warning("Ignored a pool's routing settings: %s", error)
        self.models.replace(merged.models, self._claims(), merged.routing.pools)
        self.adapters.configure(merged.routing.pools)

    def _merged(self, config: RouterConfig) -> RouterConfig:
        """The configuration, and what pools say of themselves where it says nothing of them."""
        routes = self._pool_routes
        policies = policy_names(config.routing)
        for name, route in routes.items():
            if route.policy and route.policy not in policies:
                logger.warning(
                    "Ignored an unknown routing policy",
                    extra={"pool": name, "policy": route.policy},
                )
        for name, model, owner in foreign_claims(routes):
            logger.warning(
                "Ignored a model name that belongs to another namespace",
                extra={"pool": name, "model": model, "owner": owner},
            )
        pools = discovered_pools(routes, config, policies)
        models = discovered_models(routes, config.models)
        return replace(config, routing=replace(config.routing, pools=pools), models=models)

    def _claims(self) -> dict[str, tuple[str, str]]:
        return {pool: route.claim for pool, route in self._pool_routes.items()}

    # -- what happens now and then

    async def _become_ready(self) -> None:
        """Only who knows its engines may be sent requests."""
        try:
            async with asyncio.timeout(_SYNC_S):
                await self._discovery.synced()
                await self._signals.first_round(_SYNC_S)
        except TimeoutError:
            logger.warning("Not every source of endpoints was heard from")
            await self._discovery.synced()
        if not self.is_draining:
            self.own.not_ready = ""

    async def _tick(self) -> None:
        while True:
            self._look_at_clock()
            await asyncio.sleep(_TICK_S)
            self.adapters.tick()
            for endpoint in self.dispatcher.tick():
                self._canaries.start(endpoint)
            if self._tls.look():
                logger.info("Took the new certificates towards engines")
                self.upstreams.renew_tls()
            try:
                table = self._keys_file.refresh()
            except ConfigInvalid as error:
                logger.error("Kept the old keys: %s", error)
                continue
            if table is not None:
                self._replace_keys(table)
                self.upstreams.reconfigure(self.config.timeouts, passes_keys=not table.is_required)

    def _look_at_clock(self) -> None:
        if jump_s := self.clock.look():
            self.metrics.process.clock_jumps = self.clock.num_jumps
            logger.warning("The clock was set", extra={"seconds": round(jump_s, 3)})

    async def _tick_queue(self) -> None:
        while True:
            await asyncio.sleep(_QUEUE_TICK_S)
            self.gate.tick()
            self.look_at_memory()

    def look_at_memory(self) -> None:
        self._memory.look(self.awaited_bytes())

    def _memory_changed(self, level: Level) -> None:
        self.gate.change_memory(level)
        self.own.is_full = level == Level.FULL

    def _prepare_scrapes(self) -> None:
        """What the first one would wait for is done beside the start, off the loop."""
        import_module("prometheus_client.exposition")
        self.metrics.find_version()
