"""The story of one LLMDeployment: get, parse, observe, plan, execute, report.

Level-triggered: it asks what is, never what happened. It may stop after any write and be run again
by another process; the same world gives the same plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from octavo_operator.cluster.execute import execute, set_gate
from octavo_operator.cluster.guard import NotLeader
from octavo_operator.decide import adopt, canary, readiness_gate
from octavo_operator.decide.accepted_spec import accept
from octavo_operator.decide.autoscale import ScaleHistory, decide
from octavo_operator.decide.plan import HOLD, Target, plan_capacity, plan_changes
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
from octavo_operator.report.faults import Fault, refusal, unexplained
from octavo_operator.report.reasons import Reason
from octavo_operator.report.reporter import Reported, Reporter
from octavo_operator.report.status import (
    Scaling,
    rollout_from_status,
    scaling_from_status,
)
from octavo_operator.snapshot import ReconcileSnapshot
from octavo_operator.watch.work_queue import KeyOutcome
from octavo_operator.watch.world import waits_for_gate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.cluster.execute import Report
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.canary import CanaryState, CanaryVerdict, Sample
    from octavo_operator.decide.plan import ReconcilePlan
    from octavo_operator.decide.rollout import RevisionReplica
    from octavo_operator.errors import NameConflict
    from octavo_operator.objects.kinds import Kind, Object
    from octavo_operator.report.events import EventRecorder
    from octavo_operator.report.loading import LoadingState
    from octavo_operator.routers.poller import RouterDemand
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment
    from octavo_operator.watch.world import DeploymentKey, Observed, World

logger = logging.getLogger("octavo.operator.reconcile")
# While something is decided by the passing of time, and not by an event.
TICK_S = 5.0
PREDECESSOR_TICK_S = 1.0
RIVAL_TICK_S = 30.0
CONFLICT_TICK_S = 60.0


@dataclass(slots=True)
class _Memory:
    """What a key's next reconcile had better know. Losing it costs a window or a write, no more."""

    told: Reported
    scale: ScaleHistory = field(default_factory=ScaleHistory)
    settled: dict[tuple[Kind, str], tuple[str, str]] = field(default_factory=dict)
    baseline: tuple[str, int, Sample, Sample] | None = None  # revision, step, stable, canary
    held_since: dict[str, float] = field(default_factory=dict)  # pods: by a quorum of routers


class Reconciler:
    """One `reconcile` per key at a time; the work queue sees to that.

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
            if (memory := self._memories.pop(key, None)) is not None:
                self._reporter.forget(memory.told)
            self._demand.forget(f"{key.namespace}/{key.name}")
            self._slots.release(key)
            return KeyOutcome(is_gone=True)
        if body["metadata"].get("deletionTimestamp"):
            return KeyOutcome()
        try:
            return await self._reconcile(key, body)
        except NotLeader:
            return KeyOutcome()  # whoever leads looks at everything
        except (Conflict, NotFound) as error:
            # Our picture is old; the event that mends it is on its way.
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
        previous = body.get("status") or {}
        try:
            accepted = accept(body, partial(self._check, key))
            view = self._look(key, body, accepted, memory)
        except SpecInvalid as error:
            return await self._refuse(key, body, error, memory)
        if not view.plan.is_empty:
            newest = await self._confirm(key, body)
            if newest is None:
                return KeyOutcome(is_gone=True)
            if _version(newest) != _version(body):
                return KeyOutcome(again_after_s=0.0)
        if _is_destructive(view.plan):
            # Nothing goes on the word of a watch alone.
            await self._refresh(key)
            view = self._look(key, body, accepted, memory)
        faults = [_conflict(error) for error in view.plan.conflicts]
        # Where the canary stands is stored before it is acted upon: a restart between the two
        # finds the decision, and draws the same conclusions.
        if view.capacity.state != rollout_from_status(previous) or _moved(view, previous):
            await self._report(body, view, memory.told, faults)
        report = await execute(
            self._cluster,
            self._world,
            view.plan,
            namespace=key.namespace,
            owner_uid=kinds.uid_of(body),
            pods=view.observed.engine_pods,
        )
        memory.settled.update(report.settled)
        faults += _faults_of(report)
        await self._set_gates(view.observed.pods, memory)
        for reason, text in _told(view.plan.details).items():
            await self._events.tell(body, "Normal", reason, text)
        if not view.plan.is_empty:
            view = self._look(key, body, accepted, memory, is_after=True)
        latest = self._world.deployment(key) or body
        await self._report(latest, view, memory.told, faults)
        return KeyOutcome(
            is_failed=bool(report.absent or report.refused),
            again_after_s=self._again_after(view, memory.told.loading, faults),
        )

    def _check(self, key: DeploymentKey, deployment: LLMDeployment) -> None:
        """What the parser cannot know. Raises SpecInvalid."""
        if found := self._world.other_owner(key, deployment.model.names):
            name, owner = found
            where = "" if owner.namespace == key.namespace else f" of namespace {owner.namespace}"
            raise SpecInvalid(
                "spec.model",
                f"asks for the name {name}, which LLMDeployment {owner.name}{where} had first",
                reason="ServedNameConflict",
            )
        check_autoscaler(deployment, self.settings)
        image_of(deployment, self.settings)

    async def _refuse(
        self, key: DeploymentKey, body: Object, error: SpecInvalid, memory: _Memory
    ) -> KeyOutcome:
        """No spec of it was ever accepted, or this version can carry out none: what runs stays."""
        generation = int(body["metadata"].get("generation") or 0)
        await self._set_gates(self._world.observe(key).pods, memory)
        await self._reporter.refuse(body, generation, Reason(error.reason), str(error))
        return KeyOutcome(again_after_s=_retry_of(error))

    def _look(
        self,
        key: DeploymentKey,
        body: Object,
        accepted: Accepted,
        memory: _Memory,
        *,
        is_after: bool = False,
    ) -> ReconcileSnapshot:
        """Pure but for the memory of the autoscaler. Raises SpecInvalid where a spec that was
        accepted before cannot be carried out any more."""
        deployment, uid = accepted.deployment, kinds.uid_of(body)
        status = (self._world.deployment(key) or body).get("status") or {}
        observed = self._world.observe(key)
        revision = adopt.current_revision(deployment, self.settings, observed, status)
        in_flight = self._demand.in_flight(deployment.pool)
        replicas = observed.replicas(in_flight)
        count, scaling = self._wanted(deployment, status, observed, replicas, memory, is_after)
        state = rollout_from_status(status)
        most = self.settings.max_rollouts
        running = revision
        if state.rejected != revision:
            running = self._slots.admit(key, revision, observed, replicas, most=most)
        wish = Target(revision=running, replicas=count, rollout=deployment.rollout)
        verdict = self._verdict(deployment, state, memory)
        capacity = plan_capacity(
            wish,
            observed.groups(in_flight),
            state,
            verdict=verdict,
            now=self._epoch_clock(),
        )
        traffic = Traffic(
            replicas=count, weights=capacity.weights, scaled_to_zero=_is_asleep(deployment, count)
        )
        desired = desired_objects(deployment, self.settings, traffic, revision=revision)
        plan = plan_changes(
            adopt.kept(desired, observed),
            observed,
            capacity,
            owner_uid=uid,
            owner_name=deployment.name,
            revision=revision,
            replicas=replicas,
            settled=memory.settled,
        )
        if running != revision:
            text = f"a rollout of another LLMDeployment to end (at most {most} at a time)"
            plan = replace(plan, hold=(*plan.hold, text))
        return ReconcileSnapshot(
            accepted, revision, wish, observed, replicas, capacity, plan, scaling
        )

    def _wanted(
        self,
        deployment: LLMDeployment,
        status: Object,
        observed: Observed,
        replicas: list[RevisionReplica],
        memory: _Memory,
        is_after: bool,
    ) -> tuple[int, Scaling | None]:
        """How many replicas there should be, and who said so."""
        rules = deployment.autoscaling
        if rules is None or deployment.suspend:
            return deployment.wanted_replicas, None
        if rules.provider != "octavo":  # it writes spec.replicas through the scale subresource
            return rules.clamp(deployment.replicas) if deployment.replicas else 0, None
        told = scaling_from_status(status)
        if told is not None and is_after:
            return told.replicas, told
        current = rules.clamp(deployment.replicas) if told is None else told.replicas
        serving = sum(replica.routable and not replica.is_leaving for replica in replicas)
        signals = self._demand.signals(deployment.pool, serving=serving)
        decision = decide(rules, signals, current, memory.scale, self._clock())
        memory.scale = decision.memory
        if told is not None and decision.replicas == current:
            return current, told  # its words still say why there are so many
        reason = f"{decision.reason}: {decision.message}"
        return decision.replicas, Scaling(decision.replicas, reason, self._now_text())

    def _verdict(
        self, deployment: LLMDeployment, state: CanaryState, memory: _Memory
    ) -> CanaryVerdict:
        """The canary against the stable revision since the step began."""
        if not state.revision or deployment.rollout.strategy != "Canary":
            memory.baseline = None
            return HOLD
        stable = self._demand.total(deployment.pool, state.stable)
        trial = self._demand.total(deployment.pool, state.revision)
        known = memory.baseline
        if known is None or known[:2] != (state.revision, state.step):
            memory.baseline = known = (state.revision, state.step, stable, trial)
        if not self._demand.num_answering:
            return HOLD
        analysis = deployment.rollout.canary.analysis
        return canary.judge(analysis, stable - known[2], trial - known[3])

    async def _set_gates(self, pods: Sequence[Object], memory: _Memory) -> None:
        now, held_since = self._clock(), memory.held_since
        memory.held_since = {}
        for pod in pods:
            uid = kinds.uid_of(pod)
            holders = self._demand.holders(uid)
            since = held_since.get(uid, now)
            if waits_for_gate(pod) and readiness_gate.has_quorum(holders):
                memory.held_since[uid] = since
            wanted = readiness_gate.decide(pod, holders, now - since)
            if wanted is None:
                continue
            stored = await set_gate(self._cluster, pod, wanted, now=self._now_text())
            if stored is not None:
                self._world.keep(kinds.POD, stored)

    async def _report(
        self, body: Object, view: ReconcileSnapshot, told: Reported, refusals: list[Fault]
    ) -> None:
        endpoint = self.settings.router.endpoint
        await self._reporter.report(body, view, told, refusals, endpoint=endpoint)

    def _again_after(
        self, view: ReconcileSnapshot, loading: LoadingState | None, faults: Sequence[Fault]
    ) -> float | None:
        after_s = self._next_tick(view, loading)
        retries = [_retry_of(view.accepted.refusal)]
        if any(fault.reason == Reason.NAME_CONFLICT for fault in faults):
            retries.append(CONFLICT_TICK_S)
        return min((s for s in (after_s, *retries) if s is not None), default=None)

    def _next_tick(self, view: ReconcileSnapshot, loading: LoadingState | None) -> float | None:
        if any("deleted LLMDeployment" in text for text in view.plan.hold):
            return PREDECESSOR_TICK_S
        if not view.plan.is_empty:
            return 0.0
        if view.is_queued:
            return TICK_S
        scaling = view.deployment.autoscaling
        if view.capacity.state.revision or (scaling is not None and scaling.provider == "octavo"):
            return TICK_S
        if not view.capacity.step.is_done:
            waits = unexplained(view.observed) or any(map(waits_for_gate, view.observed.pods))
            is_loading = loading is not None and loading.phase in ("Fetching", "Loading")
            return TICK_S if waits or is_loading else 10 * TICK_S
        return None

    async def _confirm(self, key: DeploymentKey, body: Object) -> Object | None:
        """The resource as the API server has it now, or None where it is gone: children of what is
        gone would be made, and collected, for ever."""
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
                await self._confirm(key, body)
        except ClusterError as error:
            logger.warning("Could not read again", extra={"key": str(key), "error": str(error)})
        return KeyOutcome(is_failed=True)

    async def _refresh(self, key: DeploymentKey) -> None:
        """Read this key's Deployments and pods anew: what was only watched may be old."""
        selector = labels.selector_text(labels.engines(key.name))
        for kind in (kinds.DEPLOYMENT, kinds.POD):
            listing = await self._cluster.find(kind, key.namespace, selector=selector)
            self._world.replace_children(key, kind, listing)

    def _memory(self, key: DeploymentKey, uid: str) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.told.uid != uid:
            memory = self._memories[key] = _Memory(Reported(uid))
        return memory


def _version(body: Object) -> tuple[str, int]:
    return kinds.uid_of(body), int(body["metadata"].get("generation") or 0)


def _is_destructive(plan: ReconcilePlan) -> bool:
    return bool(plan.delete) or any(order.replicas < order.was for order in plan.scale)


def _moved(view: ReconcileSnapshot, previous: Object) -> bool:
    """A decision about the number of replicas that is not stored yet."""
    return view.scaling is not None and view.scaling != scaling_from_status(previous)


def _retry_of(refusal: SpecInvalid | None) -> float | None:
    """Another edit is an event; that a name becomes free is none of ours."""
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


def _is_asleep(deployment: LLMDeployment, count: int) -> bool:
    scaling = deployment.autoscaling
    return (
        count == 0
        and not deployment.suspend
        and scaling is not None
        and scaling.scale_to_zero_after_s is not None
    )


def _told(details: Sequence[str]) -> dict[str, str]:
    """One event per verb: Created, Updated, Scaled, Deleted, with all that it was done to."""
    told: dict[str, list[str]] = {}
    for detail in details:
        verb, _, what = detail.partition(" ")
        told.setdefault(verb, []).append(what)
    return {verb: f"{verb} {', '.join(what)}" for verb, what in told.items()}
