"""One reconcile of an LLMDeployment: get, parse, observe, decide, execute, report.

Level-triggered: it looks at the state, never at what changed. It may stop after any write and be
run again by another process; the same state gives the same plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from octavo_operator.cluster.execute import execute, set_gates
from octavo_operator.cluster.guard import NotLeader
from octavo_operator.decide import adopt, autoscale, canary, readiness_gate
from octavo_operator.decide.accepted_spec import accept
from octavo_operator.decide.adapters import decide_adapters
from octavo_operator.decide.autoscale import ReplicaCount, ScaleHistory
from octavo_operator.decide.observed import waits_for_gate
from octavo_operator.decide.plan import SideStep, Target, plan_capacity, plan_changes
from octavo_operator.decide.prefill import plan_prefill
from octavo_operator.decide.rollout_slots import RolloutSlots
from octavo_operator.desired import Traffic, check_autoscaler, desired_objects
from octavo_operator.desired.revision import image_of
from octavo_operator.errors import (
    ClusterError,
    ClusterUnavailable,
    Conflict,
    NotFound,
    SpecInvalid,
)
from octavo_operator.objects import kinds, labels
from octavo_operator.reasons import Reason
from octavo_operator.report.events import by_verb
from octavo_operator.report.faults import Fault, refusal, unexplained
from octavo_operator.report.reporter import Reported, Reporter
from octavo_operator.report.status import rollout_from_status, scaling_from_status
from octavo_operator.snapshot import ReconcileSnapshot
from octavo_operator.watch.work_queue import KeyOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.cluster.execute import Report
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.adapters import AdapterDecision
    from octavo_operator.decide.canary import CanaryBaseline, CanaryState, CanaryVerdict
    from octavo_operator.decide.observed import DeploymentKey, Observed
    from octavo_operator.decide.plan import CapacityPlan
    from octavo_operator.errors import NameConflict
    from octavo_operator.objects.kinds import Kind, Object
    from octavo_operator.report.events import EventRecorder
    from octavo_operator.report.loading import LoadingState
    from octavo_operator.routers.poller import RouterDemand
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment
    from octavo_operator.watch.world import World

logger = logging.getLogger("octavo.operator.reconcile")
# While a decision depends on the passing of time, and not on an event.
TICK_S = 5.0
PREDECESSOR_TICK_S = 1.0
RIVAL_TICK_S = 30.0
CONFLICT_TICK_S = 60.0


class _Outdated(Exception):
    """The LLMDeployment was edited or deleted since the watch reported it."""

    def __init__(self, *, is_gone: bool) -> None:
        super().__init__("deleted" if is_gone else "edited")
        self.outcome = KeyOutcome(is_gone=True) if is_gone else KeyOutcome(again_after_s=0.0)


@dataclass(slots=True)
class _Memory:
    """What helps the next reconcile of a key. Losing it costs a window or a write, no more."""

    reported: Reported
    scale: ScaleHistory = field(default_factory=ScaleHistory)
    settled: dict[tuple[Kind, str], tuple[str, str]] = field(default_factory=dict)
    baseline: CanaryBaseline | None = None
    held_since: dict[str, float] = field(default_factory=dict)  # pods: by a quorum of routers


class Reconciler:
    """One `reconcile` per key at a time: the work queue ensures it.

    `settings` may be exchanged at any time, such as when the cluster gained an optional kind.
    """

    def __init__(
        self,
        cluster: Cluster,
        world: World,
        demand: RouterDemand,
        settings: OperatorSettings,
        events: EventRecorder,
        *,
        clock: Callable[[], float],
        epoch_clock: Callable[[], float],
        now_text: Callable[[], str],
    ) -> None:
        self._cluster = cluster
        self._world = world
        self._demand = demand
        self.settings = settings
        self._events = events
        self._clock = clock
        self._epoch_clock = epoch_clock
        self._now_text = now_text
        self._reporter = Reporter(cluster, world, demand, events, clock=clock, now_text=now_text)
        self._memories: dict[DeploymentKey, _Memory] = {}
        self._slots = RolloutSlots(world)

    async def reconcile(self, key: DeploymentKey) -> KeyOutcome:
        body = self._world.deployment(key)
        if body is None:  # deleted: owner references clean up
            self._forget(key)
            await self._report_orphans(key)
            return KeyOutcome(is_gone=True)
        if body["metadata"].get("deletionTimestamp"):
            return KeyOutcome()
        try:
            return await self._reconcile(key, body)
        except _Outdated as outdated:
            return outdated.outcome
        except NotLeader:
            return KeyOutcome()  # the leader reconciles every key
        except (Conflict, NotFound) as error:
            # The cache is old; the event that updates it is on its way.
            logger.info("Read again", extra={"key": str(key), "error": str(error)})
            return await self._reread(key)
        except ClusterUnavailable as error:
            logger.warning("Backed off", extra={"key": str(key), "error": str(error)})
            return KeyOutcome(is_failed=True, again_after_s=error.retry_after_s)
        except ClusterError as error:
            logger.warning("Refused", extra={"key": str(key), "error": str(error)})
            return KeyOutcome(is_failed=True)

    async def _reconcile(self, key: DeploymentKey, body: Object) -> KeyOutcome:
        memory = self._memory(key, kinds.uid_of(body))
        try:
            accepted = accept(body, partial(self._check, key))
            snapshot = self._decide(key, body, accepted, memory)
        except SpecInvalid as error:
            return await self._refuse(key, body, error, memory)
        snapshot = await self._confirm(key, body, snapshot, memory)
        faults = [_conflict(error) for error in snapshot.plan.conflicts]
        # Decisions are stored before they are executed: a restart between the two finds them, and
        # comes to the same conclusions.
        if _has_new_decision(snapshot, body.get("status") or {}):
            await self._report(body, snapshot, memory, faults)
        report = await execute(
            self._cluster,
            self._world,
            snapshot.plan,
            namespace=key.namespace,
            pods=(*snapshot.observed.engine_pods, *snapshot.observed.prefill.engine_pods),
        )
        memory.settled.update(report.settled)
        faults += _faults_of(report)
        await self._set_gates(snapshot.observed.pods, memory)
        for reason, text in by_verb(snapshot.plan.details).items():
            await self._events.record(body, "Normal", reason, text)
        if not snapshot.plan.is_empty:
            snapshot = self._decide(key, body, accepted, memory, has_executed=True)
        await self._report(self._world.deployment(key) or body, snapshot, memory, faults)
        return KeyOutcome(
            is_failed=bool(report.absent or report.refused),
            again_after_s=_again_after(snapshot, memory.reported.loading, faults),
        )

    def _check(self, key: DeploymentKey, deployment: LLMDeployment) -> None:
        """What the parser cannot check. Raises SpecInvalid."""
        if found := self._world.other_owner(key, deployment.names):
            name, owner = found
            where = "" if owner.namespace == key.namespace else f" in namespace {owner.namespace}"
            raise SpecInvalid(
                "spec.model" if name in deployment.model.names else "spec.adapters",
                f"uses the name {name}, which already belongs to LLMDeployment {owner.name}{where}",
                reason="ServedNameConflict",
            )
        check_autoscaler(deployment, self.settings)
        image_of(deployment, self.settings)

    def _decide(
        self,
        key: DeploymentKey,
        body: Object,
        accepted: Accepted,
        memory: _Memory,
        *,
        has_executed: bool = False,
    ) -> ReconcileSnapshot:
        """Writes nothing but `memory`. Raises SpecInvalid where a spec that was accepted before
        cannot be carried out any more. `has_executed`: the autoscaler has decided already."""
        deployment = accepted.deployment
        status = (self._world.deployment(key) or body).get("status") or {}
        observed = self._world.observe(key)
        revision = adopt.current_revision(deployment, self.settings, observed, status)
        in_flight = self._demand.in_flight(deployment.pool)
        replicas = observed.replicas(in_flight)
        count = self._count(deployment, status, observed, memory, is_decided=has_executed)
        state = rollout_from_status(status)
        most = self.settings.max_rollouts
        running = revision
        if state.rejected != revision:
            running = self._slots.admit(key, revision, observed, replicas, most=most)
        target = Target(revision=running, replicas=count.replicas, rollout=deployment.rollout)
        capacity = plan_capacity(
            target,
            observed.groups(in_flight),
            state,
            verdict=self._judge(deployment, state, memory),
            now=self._epoch_clock(),
        )
        groups = observed.prefill.groups(in_flight)
        prefill = SideStep(
            plan_prefill(deployment.prefill, target, groups, capacity.state),
            observed.prefill,
            observed.prefill.replicas(in_flight),
        )
        adapters = decide_adapters(deployment, self._world.adapters(key), self._world.adapter_owner)
        traffic = _traffic(deployment, count.replicas, capacity, adapters)
        desired = desired_objects(deployment, self.settings, traffic, revision=revision)
        plan = plan_changes(
            adopt.kept(desired, observed),
            observed,
            capacity,
            owner_uid=kinds.uid_of(body),
            owner_name=deployment.name,
            revision=revision,
            replicas=replicas,
            prefill=prefill,
            settled=memory.settled,
        )
        if running != revision:
            text = f"a rollout of another LLMDeployment to end (at most {most} at a time)"
            plan = replace(plan, hold=(*plan.hold, text))
        return ReconcileSnapshot(
            accepted,
            revision,
            target,
            observed,
            replicas,
            capacity,
            prefill,
            plan,
            count.scaling,
            adapters,
        )

    def _count(
        self,
        deployment: LLMDeployment,
        status: Object,
        observed: Observed,
        memory: _Memory,
        *,
        is_decided: bool,
    ) -> ReplicaCount:
        last = scaling_from_status(status)
        serving = sum(
            replica.routable and not replica.is_leaving for replica in observed.replicas({})
        )
        prefill = frozenset(map(kinds.uid_of, observed.prefill.engine_pods))
        count = autoscale.wanted_replicas(
            deployment,
            last,
            memory.scale,
            partial(self._demand.signals, deployment.pool, serving=serving, without=prefill),
            now=self._clock(),
            now_text=self._now_text,
            is_decided=is_decided,
        )
        memory.scale = count.history
        return count

    def _judge(
        self, deployment: LLMDeployment, state: CanaryState, memory: _Memory
    ) -> CanaryVerdict:
        totals = partial(self._demand.total, deployment.pool)
        rollout = deployment.rollout
        memory.baseline = canary.baseline_of(rollout, state, totals, memory.baseline)
        return canary.judge_since(
            memory.baseline,
            rollout.canary.analysis,
            state,
            totals,
            is_reported=bool(self._demand.num_answering),
        )

    async def _confirm(
        self, key: DeploymentKey, body: Object, snapshot: ReconcileSnapshot, memory: _Memory
    ) -> ReconcileSnapshot:
        """The snapshot to execute: watches may lag, so that a write is checked against the API
        server before, and a deletion decided again on objects read anew. Raises _Outdated."""
        if snapshot.plan.is_empty:
            return snapshot
        newest = await self._read(key, body)
        if newest is None:
            raise _Outdated(is_gone=True)
        if _version(newest) != _version(body):
            raise _Outdated(is_gone=False)
        if not snapshot.plan.is_destructive:
            return snapshot
        await self._refresh(key)
        return self._decide(key, body, snapshot.accepted, memory)

    async def _set_gates(self, pods: Sequence[Object], memory: _Memory) -> None:
        changes = readiness_gate.decide_all(
            pods, self._demand.holders, memory.held_since, self._clock()
        )
        memory.held_since = changes.held_since
        await set_gates(self._cluster, self._world, changes.gates, now_text=self._now_text)

    async def _refuse(
        self, key: DeploymentKey, body: Object, error: SpecInvalid, memory: _Memory
    ) -> KeyOutcome:
        """Neither this spec nor an earlier one can be carried out: what runs is left alone."""
        generation = int(body["metadata"].get("generation") or 0)
        await self._set_gates(self._world.observe(key).pods, memory)
        await self._reporter.refuse(body, generation, Reason(error.reason), str(error))
        return KeyOutcome(again_after_s=_retry_of(error))

    async def _report(
        self, body: Object, snapshot: ReconcileSnapshot, memory: _Memory, refusals: list[Fault]
    ) -> None:
        endpoint = self.settings.router.endpoint
        await self._reporter.report(body, snapshot, memory.reported, refusals, endpoint=endpoint)

    async def _report_orphans(self, key: DeploymentKey) -> None:
        """LLMAdapters of an LLMDeployment that does not exist."""
        try:
            await self._reporter.report_orphans(key.name, self._world.adapters(key))
        except NotLeader:
            return
        except ClusterError as error:  # the next event or list of theirs tries again
            logger.warning("Refused", extra={"key": str(key), "error": str(error)})

    async def _read(self, key: DeploymentKey, body: Object) -> Object | None:
        """The resource as the API server has it now, or None where it is gone: children of what is
        gone would be created, and collected, for ever."""
        found = await self._cluster.get(kinds.LLM_DEPLOYMENT, key.namespace, key.name)
        if found is None or kinds.uid_of(found) != kinds.uid_of(body):
            self._world.drop(kinds.LLM_DEPLOYMENT, body)
        if found is None:
            return None
        self._world.keep(kinds.LLM_DEPLOYMENT, found)
        return found

    async def _reread(self, key: DeploymentKey) -> KeyOutcome:
        try:
            await self._refresh(key)
            if (body := self._world.deployment(key)) is not None:
                await self._read(key, body)
        except ClusterError as error:
            logger.warning("Could not read again", extra={"key": str(key), "error": str(error)})
        return KeyOutcome(is_failed=True)

    async def _refresh(self, key: DeploymentKey) -> None:
        """Read this key's Deployments and pods anew: what was only watched may be old."""
        selector = labels.selector_text(labels.pods(key.name))
        for kind in (kinds.DEPLOYMENT, kinds.POD):
            listing = await self._cluster.find(kind, key.namespace, selector=selector)
            self._world.replace_children(key, kind, listing)

    def _memory(self, key: DeploymentKey, uid: str) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.reported.uid != uid:
            memory = self._memories[key] = _Memory(Reported(uid))
        return memory

    def _forget(self, key: DeploymentKey) -> None:
        if (memory := self._memories.pop(key, None)) is not None:
            self._reporter.forget(memory.reported)
        self._demand.forget(f"{key.namespace}/{key.name}")
        self._slots.release(key)


def _version(body: Object) -> tuple[str, int]:
    return kinds.uid_of(body), int(body["metadata"].get("generation") or 0)


def _has_new_decision(snapshot: ReconcileSnapshot, status: Object) -> bool:
    """A step of the rollout or a number of replicas that is not stored yet."""
    if snapshot.capacity.state != rollout_from_status(status):
        return True
    return snapshot.scaling is not None and snapshot.scaling != scaling_from_status(status)


def _again_after(
    snapshot: ReconcileSnapshot, loading: LoadingState | None, faults: Sequence[Fault]
) -> float | None:
    """When time alone may change the decision; None: only an event can."""
    after_s = _next_tick(snapshot, loading)
    retries = [_retry_of(snapshot.accepted.refusal)]
    if any(one.reason == Reason.ADAPTER_NAME_CONFLICT for one in snapshot.adapters.refused):
        retries.append(RIVAL_TICK_S)
    if any(fault.reason == Reason.NAME_CONFLICT for fault in faults):
        retries.append(CONFLICT_TICK_S)
    return min((s for s in (after_s, *retries) if s is not None), default=None)


def _next_tick(snapshot: ReconcileSnapshot, loading: LoadingState | None) -> float | None:
    if any("deleted LLMDeployment" in text for text in snapshot.plan.hold):
        return PREDECESSOR_TICK_S
    if not snapshot.plan.is_empty:
        return 0.0
    if snapshot.is_queued:
        return TICK_S
    scaling = snapshot.deployment.autoscaling
    if snapshot.capacity.state.revision or (scaling is not None and scaling.provider == "octavo"):
        return TICK_S
    if not snapshot.is_done:
        observed = snapshot.observed
        waits = unexplained(observed) or any(map(waits_for_gate, observed.pods))
        is_loading = loading is not None and loading.phase in ("Fetching", "Loading")
        return TICK_S if waits or is_loading else 10 * TICK_S
    return None


def _retry_of(refusal: SpecInvalid | None) -> float | None:
    """An edit of this resource is an event; that another one frees a name is not."""
    is_taken = refusal is not None and refusal.reason == "ServedNameConflict"
    return RIVAL_TICK_S if is_taken else None


def _conflict(error: NameConflict) -> Fault:
    return Fault(Reason.NAME_CONFLICT, str(error))


def _faults_of(report: Report) -> list[Fault]:
    faults = [_conflict(error) for error in report.conflicts]
    for body, why in report.refused:
        subject = f"{body['kind']} {kinds.name_of(body)}"
        faults.append(Fault(refusal(why.message, why.status), why.message, subject))
    return faults


def _traffic(
    deployment: LLMDeployment, replicas: int, capacity: CapacityPlan, adapters: AdapterDecision
) -> Traffic:
    return Traffic(
        replicas=replicas,
        weights=capacity.weights,
        scaled_to_zero=_is_scaled_to_zero(deployment, replicas),
        adapters=tuple(one.adapter for one in adapters.taken),
    )


def _is_scaled_to_zero(deployment: LLMDeployment, replicas: int) -> bool:
    scaling = deployment.autoscaling
    return (
        replicas == 0
        and not deployment.suspend
        and scaling is not None
        and scaling.scale_to_zero_after_s is not None
    )
