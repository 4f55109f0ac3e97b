"""Killed before or right after each of its calls, and begun anew: the end is the same.

The client dies within the proxy: from a numbered call on, nothing it asks is done or answered. The
next operator knows only what the API server knows.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.cluster.guard import GuardedCluster, TokenBucket
from octavo_operator.cluster.kube import KubeCluster
from octavo_operator.cluster.kube_config import load
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.errors import ClusterUnavailable
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.reconcile import Reconciler
from octavo_operator.report.events import EventRecorder
from octavo_operator.routers.poller import RouterDemand
from octavo_operator.settings import OperatorSettings
from octavo_operator.watch.informer import Informer
from octavo_operator.watch.world import WATCHED, World
from tests.fakes.clock import ManualClock
from tests.fakes.deployments import with_images
from tests.fakes.effort import is_full, sample
from tests.fakes.fault_proxy import ApiCall, CutAfter, CutBefore, Fault, FaultProxy
from tests.fakes.live_operator import live
from tests.fakes.operator import KEY, make_deployment
from tests.fakes.operator_story import snapshot

if TYPE_CHECKING:
    from octavo_operator.cluster.kube_config import KubeConfig
    from tests.fakes.apiserver import ApiServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
SETTINGS = with_images(OperatorSettings(network_policy=True))
# The steps of a life, each from the state that the one before has come to.
STEPS: dict[str, dict[str, Any]] = {
    "create": {},
    "edit": {"engine": {"maxNumSeqs": 7}},
    "scale": {"replicas": 3},
    "revert": {"engine": {"maxNumSeqs": None}},
}
MAX_CALL = 40


class Life:
    """An operator without its watches: it lists before each look."""

    def __init__(self, cluster: KubeCluster, namespace: str) -> None:
        clock = ManualClock(1_000_000.0)
        metrics = OperatorMetrics()
        self.world = World()
        demand = RouterDemand(clock)
        demand.expect(())
        bucket = TokenBucket(per_second=1e6, burst=1_000_000, clock=clock)
        guarded = GuardedCluster(cluster, may_write=lambda: True, bucket=bucket, metrics=metrics)
        self.key = DeploymentKey(namespace, KEY.name)
        self.intake = Informer(
            guarded, self.world, namespaces=(namespace,), wake=lambda key: None,
            metrics=metrics, clock=clock, rng=Random(1),
        )  # fmt: skip
        self.reconciler = Reconciler(
            guarded, self.world, demand, SETTINGS,
            EventRecorder(guarded, clock=clock, now_text=lambda: "2026-01-01T00:00:00Z"),
            clock=clock, epoch_clock=clock, now_text=lambda: "2026-01-01T00:00:00Z",
        )  # fmt: skip

    async def look(self) -> bool:
        """Whether all went well."""
        for kind in WATCHED:
            await self.intake.refresh(kind)
        return not (await self.reconciler.reconcile(self.key)).is_failed


async def settle(server: ApiServer, namespace: str, config: KubeConfig) -> None:
    """Looks of one operator, and the controllers' work between them, until nothing changes."""
    async with KubeCluster(config, field_manager="octavo-operator") as cluster:
        life = Life(cluster, namespace)
        before: Any = None
        for _ in range(30):
            is_well = await life.look()
            live(server, namespace)
            now = picture(server, namespace)
            if is_well and now == before:
                return
            before = now
    raise AssertionError("it does not settle")


def picture(server: ApiServer, namespace: str) -> Any:
    return snapshot(server, namespace), server.get(make_deployment(namespace=namespace))["status"]


async def live_until(
    server: ApiServer, namespace: str, proxy: FaultProxy, *, call: int, is_answered: bool
) -> bool:
    """Until its call of that number. False where it did not make so many."""
    first = len(proxy.calls)

    def on_call(each: ApiCall) -> Fault:
        if each.number < first + call:
            return None
        proxy.is_dead = True
        return CutAfter() if is_answered else CutBefore()

    proxy.on_call, proxy.is_dead = on_call, False
    async with KubeCluster(proxy.config, field_manager="octavo-operator") as cluster:
        life = Life(cluster, namespace)
        for _ in range(6):
            if proxy.is_dead:
                return True
            try:
                await life.look()
            except ClusterUnavailable:
                break
            live(server, namespace)
    return proxy.is_dead


@pytest.fixture(scope="module")
def reference(apiserver: ApiServer) -> dict[str, Any]:
    """What each step comes to when nobody is killed."""
    namespace = apiserver.make_namespace()
    config = load({}, str(apiserver.kubeconfig))
    ends = {}
    for step, change in STEPS.items():
        begin(apiserver, namespace, step, change)
        asyncio.run(settle(apiserver, namespace, config))
        ends[step] = snapshot(apiserver, namespace)
    return ends


def begin(server: ApiServer, namespace: str, step: str, change: dict[str, Any]) -> None:
    if step == "create":
        server.create(make_deployment(namespace=namespace, replicas=2))
    else:
        server.patch(make_deployment(namespace=namespace), {"spec": change})


@pytest.mark.parametrize("call", sample(range(1, MAX_CALL + 1), (1, 14)))
def test_killed_at_every_call_it_comes_to_the_same(apiserver, reference, call):
    """A life is killed once in every step, each time some calls later; before the server hears of
    it, and after, by turns."""

    async def story() -> int:
        num_killed = 0
        namespace = apiserver.make_namespace()
        async with FaultProxy(apiserver) as proxy:
            for number, (step, change) in enumerate(STEPS.items()):
                begin(apiserver, namespace, step, change)
                at = LISTS + (call + 4 * number - 1) % MAX_CALL + 1
                num_killed += await live_until(
                    apiserver, namespace, proxy, call=at, is_answered=bool((call + number) % 2)
                )
                proxy.is_dead, proxy.on_call = False, lambda each: None
                await settle(apiserver, namespace, proxy.config)
                assert snapshot(apiserver, namespace) == reference[step], (step, at)
        return num_killed

    # Not every step has as many calls as the longest one.
    assert asyncio.run(story()) >= (0 if is_full() else 2)


LISTS = 10  # with which each look begins
