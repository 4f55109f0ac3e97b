"""The operator as a process: everything built, wired, started and ended, in one place."""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import random
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import aiohttp

from octavo_common.loop_watch import STALL_S, LoopWatch
from octavo_engine.protocol.endpoints import OPERATOR_PORT
from octavo_operator.cluster.connections import HttpSession
from octavo_operator.cluster.guard import GuardedCluster, TokenBucket
from octavo_operator.cluster.leader import Leader, LeaseTimes
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.errors import ClusterError
from octavo_operator.health import HealthServer, OperatorHealth
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.objects import kinds
from octavo_operator.reconcile import Reconciler
from octavo_operator.report.events import EventRecorder
from octavo_operator.routers.fetch import TIMEOUT_S, RouterFetch, router_tls
from octavo_operator.routers.poller import RouterDemand, RouterPoller
from octavo_operator.watch import kopf_source
from octavo_operator.watch.informer import Informer
from octavo_operator.watch.namespaces import ASK_AGAIN_S, permitted, until_permitted
from octavo_operator.watch.work_queue import KeyOutcome, Pace, Schedule, WorkQueue
from octavo_operator.watch.world import WATCHED, World, are_synced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_operator.cluster.kube import KubeCluster
    from octavo_operator.cluster.kube_config import KubeConfig
    from octavo_operator.settings import OperatorSettings

logger = logging.getLogger("octavo.operator")

LEASE_NAME = "octavo-operator"
LOOP_TICK_S = 0.25
MAX_LAG_S = 20.0  # of an event loop; and then liveness fails
RESTART_S = 2.0  # between the end of a watch and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How this process runs, as opposed to what it makes."""

    namespace: str  # of the operator itself: its Lease
    identity: str  # of this replica: the pod's name
    host: str = "0.0.0.0"
    port: int = OPERATOR_PORT
    num_workers: int = 8
    pace: Pace = field(default_factory=Pace)
    resync_s: float = 300.0  # a full list of every kind
    writes_per_s: float = 50.0  # to the API server, for all LLMDeployments together
    write_burst: int = 200
    lease: LeaseTimes | None = field(default_factory=LeaseTimes)  # None: there is only one
    lease_name: str = LEASE_NAME
    deployment: str = ""  # of the operator itself, which the Lease goes with
    poll_routers_s: float = 1.0
    ask_namespaces_s: float = ASK_AGAIN_S  # for those that may not be watched


class Operator:
    """Built within `async with KubeCluster`; `run` ends by a signal, `stop`, or an error."""

    def __init__(
        self, config: KubeConfig, cluster: KubeCluster, settings: OperatorSettings, run: RunSettings
    ) -> None:
        clock = time.monotonic
        self._config = config
        self._cluster = cluster
        self._settings = settings
        self._run = run
        self._router_tls = router_tls(settings.router)
        self.metrics = OperatorMetrics()
        self.world = World()
        self.demand = RouterDemand(clock)
        self._stop = asyncio.Event()
        self._loop = _loop_watch("operator")
        self._watch_loop = _loop_watch("kopf")
        self._leader = (
            None
            if run.lease is None
            else Leader(
                cluster,
                namespace=run.namespace,
                name=run.lease_name,
                identity=run.identity,
                clock=clock,
                now_text=_now_micro,
                times=run.lease,
                deployment=run.deployment,
            )
        )
        bucket = TokenBucket(per_second=run.writes_per_s, burst=run.write_burst, clock=clock)
        self._guarded = GuardedCluster(
            cluster,
            may_write=self._may_write,
            bucket=bucket,
            metrics=self.metrics,
            time_left_s=self._time_left_s,
        )
        self._events = EventRecorder(self._guarded, clock=clock, now_text=_now)
        self._reconciler: Reconciler | None = None
        pace = replace(run.pace, resync_s=run.resync_s)
        self.queue: WorkQueue[DeploymentKey] = WorkQueue(
            self._work,
            Schedule(pace, random.Random()),
            clock=clock,
            metrics=self.metrics,
            num_workers=run.num_workers,
        )
        self.intake = Informer(
            self._guarded,
            self.world,
            namespaces=settings.namespaces,
            wake=self.queue.add,
            served=self._served,
            metrics=self.metrics,
            clock=clock,
            rng=random.Random(),
            every_s=run.resync_s,
        )

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Raises SettingsInvalid, OSError (port taken); else returns after a signal or `stop`."""
        health = HealthServer(self._health, self.metrics)
        server = await health.start(self._run.host, self._run.port)
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._stop.set)
        try:
            async with self._loop, server, asyncio.TaskGroup() as tasks:
                work = [tasks.create_task(self._all()), tasks.create_task(self._watch())]
                await self._stop.wait()
                for task in work:
                    task.cancel()
        finally:
            if self._leader is not None:
                await self._leader.give_back()
        logger.info("Stopped")

    async def _all(self) -> None:
        await self._wait_for_crd()
        self._reconciler = Reconciler(
            self._guarded,
            self.world,
            self.demand,
            self._settings,
            self._events,
            clock=time.monotonic,
            epoch_clock=time.time,
            now_text=_now,
        )
        began_at = time.monotonic()
        await self.intake.fill()
        logger.info(
            "Listed everything",
            extra={"objects": len(self.world), "seconds": round(time.monotonic() - began_at, 2)},
        )
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with HttpSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            poller = RouterPoller(
                self._guarded,
                self.demand,
                namespace=self._settings.router.namespace,
                scheme=self._settings.router.scheme,
                fetch=RouterFetch(session.http, self._settings.router, self._router_tls),
                wake=self._wake_pool,
                metrics=self.metrics,
                every_s=self._run.poll_routers_s,
                clock=time.monotonic,
            )
            await poller.poll()
            tasks.create_task(poller.run())
            tasks.create_task(self.intake.run())
            tasks.create_task(self.queue.run())
            if self._leader is not None:
                tasks.create_task(self._leader.run(self._became_leader))

    async def _watch(self) -> None:
        """kopf ends when what it watches vanishes: then we wait until it is back."""
        while not self._stop.is_set():
            await self._wait_for_crd()
            named = self._settings.namespaces
            served = await permitted(self._guarded, named)
            if served or not named:
                await self._watch_in(served, [each for each in named if each not in served])
            await asyncio.sleep(RESTART_S)

    async def _watch_in(self, namespaces: Sequence[str], missing: Sequence[str]) -> None:
        """Until the watches end, or one of the `missing` namespaces can be watched too."""
        watching = asyncio.create_task(
            kopf_source.watch(
                self._config, self.intake, namespaces=namespaces, loop_watch=self._watch_loop
            )
        )
        back = asyncio.create_task(
            until_permitted(self._guarded, missing, self._run.ask_namespaces_s)
        )
        try:
            await asyncio.wait((watching, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            back.cancel()
            (ended, _) = await asyncio.gather(watching, back, return_exceptions=True)
        if isinstance(ended, Exception):
            # Whatever ended kopf (its own classes are private), we begin anew and compare all.
            logger.warning("The watches ended", extra={"error": repr(ended)})

    async def _wait_for_crd(self) -> None:
        is_logged = False
        while not self._stop.is_set():
            self.intake.tried()
            try:
                if await self._cluster.serves(kinds.LLM_DEPLOYMENT):
                    return
                problem = "the CRD llmdeployments.octavo.dev is not installed"
            except ClusterError as error:
                problem = str(error)
            if not is_logged:
                logger.warning("Waiting for the API", extra={"problem": problem})
                is_logged = True
            await asyncio.sleep(RESTART_S)

    def _served(self, capabilities: frozenset[str]) -> None:
        """The cluster gained or lost an optional kind."""
        logger.info("Found optional kinds", extra={"kinds": sorted(capabilities)})
        self._settings = replace(self._settings, capabilities=capabilities)
        if self._reconciler is not None:
            self._reconciler.settings = self._settings
        for key in self.world.all_keys():
            self.queue.add(key)

    async def _work(self, key: DeploymentKey) -> KeyOutcome:
        if not self._may_write() or self._reconciler is None:
            return KeyOutcome()
        self.metrics.num_objects = len(self.world)
        return await self._reconciler.reconcile(key)

    def _may_write(self) -> bool:
        return self._leader is None or self._leader.is_leading()

    def _time_left_s(self) -> float:
        return math.inf if self._leader is None else self._leader.time_left_s()

    def _became_leader(self) -> None:
        for key in self.world.all_keys():
            self.queue.add(key)

    def _wake_pool(self, pool: str) -> None:
        namespace, _, name = pool.partition("/")
        key = DeploymentKey(namespace, name)
        if self.world.has(key):
            self.queue.add(key)

    def _health(self) -> OperatorHealth:
        return OperatorHealth(
            event_age_s=time.monotonic() - self.intake.last_heard_at,
            max_event_age_s=self.intake.max_age_s,
            tried_age_s=time.monotonic() - self.intake.tried_at,
            is_synced=are_synced(self.world, WATCHED),
            is_leading=self._may_write(),
            # Our own loop answers this: if it is blocked, the probe fails.
            loop_lag_s=max(self._loop.lag_s, self._watch_loop.lag_s),
            max_loop_lag_s=MAX_LAG_S,
        )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _now_micro() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _loop_watch(name: str) -> LoopWatch:
    """Stacks are written as soon as it counts as standing still: leases are lost in seconds."""
    logger = logging.getLogger("octavo.operator.loop")
    return LoopWatch(logger, name=name, tick_s=LOOP_TICK_S, dump_s=STALL_S)
