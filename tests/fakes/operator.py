"""The operator over a cluster in memory: a test moves its events, its queue and its clock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import GROUP, KIND, VERSION
from octavo_engine.protocol.state import EndpointState, PoolState, RevisionState, State
from octavo_operator.cluster.api import Listing
from octavo_operator.cluster.guard import GuardedCluster, TokenBucket
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.objects import kinds
from octavo_operator.reconcile import Reconciler
from octavo_operator.report.events import EventRecorder
from octavo_operator.routers.poller import RouterDemand
from octavo_operator.watch.world import WATCHED, World
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import FakeCluster
from tests.fakes.deployments import with_images
from tests.fakes.workloads import Workloads

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Kind, Object
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.watch.work_queue import KeyOutcome
    from tests.fakes.cluster import Call

KEY = DeploymentKey("default", "smollm2")


class OperatorBench:
    """Build it again over the same cluster to restart the operator."""

    def __init__(
        self,
        cluster: FakeCluster | None = None,
        *,
        clock: ManualClock | None = None,
        settings: OperatorSettings | None = None,
    ) -> None:
        self.cluster = cluster or FakeCluster()
        self.clock = clock or ManualClock(1_000_000.0)
        self.world = World()
        self.demand = RouterDemand(self.clock)
        self.demand.expect(())
        self.metrics = OperatorMetrics()
        self.is_leading = True
        guarded = GuardedCluster(
            self.cluster,
            may_write=lambda: self.is_leading,
            bucket=TokenBucket(per_second=1e6, burst=1_000_000, clock=self.clock),
            metrics=self.metrics,
        )
        self.reconciler = Reconciler(
            guarded,
            self.world,
            self.demand,
            with_images(settings),
            EventRecorder(guarded, clock=self.clock, now_text=self.now_text),
            clock=self.clock,
            epoch_clock=self.clock,
            now_text=self.now_text,
        )
        self.workloads = Workloads(self.cluster)
        self.unheard: frozenset[Kind] = frozenset()  # kinds of which no deletion is reported
        self._seen = 0
        self.list_all()

    def now_text(self) -> str:
        return f"2026-01-01T00:00:{self.clock.now:.3f}Z"

    def list_all(self) -> None:
        """What a start or a lost watch does."""
        self._seen = len(self.cluster.events)
        for kind in kinds.ALL:
            if kind not in self.cluster.absent and kind in WATCHED:
                self.world.replace(kind, Listing(self.cluster.all(kind), 1 << 62))

    def deliver(self) -> None:
        """All watch events so far."""
        for event in self.cluster.events[self._seen :]:
            if event.kind not in WATCHED:
                continue
            if event.type == "DELETED":
                if event.kind not in self.unheard:
                    self.world.drop(event.kind, event.body)
            else:
                self.world.keep(event.kind, event.body)
        self._seen = len(self.cluster.events)

    def reconcile(self, key: DeploymentKey = KEY) -> KeyOutcome:
        self.deliver()
        return asyncio.run(self.reconciler.reconcile(key))

    def settle(self, key: DeploymentKey = KEY, *, rounds: int = 40) -> None:
        """Until neither the operator nor the cluster's controllers have anything left to do.
        Engines become ready at once."""
        for _ in range(rounds):
            before = len(self.cluster.events)
            outcome = self.reconcile(key)
            self.workloads.sync()
            self.workloads.make_all_ready()
            if len(self.cluster.events) == before and not outcome.is_failed:
                return
        raise AssertionError(f"not settled after {rounds} rounds: {self.cluster.calls[-10:]}")

    def calls_at_rest(self) -> list[Call]:
        """What this operator, and one that has just started, call after an hour of nothing."""
        self.cluster.calls.clear()
        self.clock.advance(3600)
        self.reconcile()
        OperatorBench(self.cluster, clock=self.clock).reconcile()
        return self.cluster.calls

    def create(self, **spec: Any) -> Object:
        self.cluster.put(make_deployment(**spec))
        return self.deployment()

    def edit(self, **spec: Any) -> None:
        self.cluster.merge(kinds.LLM_DEPLOYMENT, *KEY, {"spec": spec})

    def deployment(self) -> Object:
        return self.cluster.one(kinds.LLM_DEPLOYMENT, *KEY)

    def conditions(self) -> dict[str, tuple[str, str, str]]:
        return {
            c["type"]: (c["status"], c["reason"], c["message"])
            for c in self.deployment()["status"]["conditions"]
        }

    def engines(self) -> dict[str, int]:
        """Replicas requested, by revision."""
        return {
            kinds.labels_of(body)["octavo.dev/revision"]: body["spec"]["replicas"]
            for body in self.cluster.all(kinds.DEPLOYMENT)
        }

    def pods(self) -> list[Object]:
        return sorted(self.cluster.all(kinds.POD), key=kinds.name_of)

    def engine_deployments(self) -> list[Object]:
        return self.cluster.all(kinds.DEPLOYMENT)

    def num_ready(self) -> int:
        return sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
            for pod in self.cluster.all(kinds.POD)
        )


def running_operator(**spec: Any) -> OperatorBench:
    """With an LLMDeployment of two replicas that serve, unless a test says otherwise."""
    bench = OperatorBench()
    bench.create(**{"replicas": 2, **spec})
    bench.settle()
    return bench


def verbs(calls: list[Call]) -> list[tuple[str, str]]:
    return [(call.verb, call.kind.name) for call in calls]


def make_deployment(name: str = KEY.name, namespace: str = KEY.namespace, **spec: Any) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"model": {"uri": "demo://smollm2"}, **spec},
    }


def make_state(
    *,
    replica: str = "router-0",
    epoch: str = "e1",
    pool: str = "default/smollm2",
    ready: tuple[str, ...] = (),
    busy: dict[str, int] | None = None,
    revisions: tuple[RevisionState, ...] = (),
    **demand: Any,
) -> State:
    """What a router replica says: pods that it sends traffic to, and `busy`, their requests."""
    endpoints = [
        EndpointState(uid, pool, "", "http://e", "ready", in_flight=(busy or {}).get(uid, 0))
        for uid in ready
    ]
    pools = [PoolState(pool, revisions=list(revisions), **demand)]
    return State(epoch=epoch, replica=replica, pools=pools, endpoints=endpoints)
