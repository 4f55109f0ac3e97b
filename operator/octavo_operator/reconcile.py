"""One reconcile of an LLMDeployment: gather, decide, execute, set gates, report.

Level-triggered: it looks at the state, never at what changed. It may stop after any write and be
run again by another process; the same state gives the same plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_operator.cluster.execute import execute, set_gates
from octavo_operator.cluster.guard import NotLeader
from octavo_operator.decide import autoscale, flip, prefill, readiness_gate
from octavo_operator.decide.accepted_spec import accept
from octavo_operator.decide.adapter_trials import trials_from_status
from octavo_operator.decide.autoscale import LoadSignals
from octavo_operator.decide.decision import DecisionInputs, DecisionMemory, decide
from octavo_operator.decide.flip import FlipSignals
from octavo_operator.decide.rollout_slots import RolloutSlots
from octavo_operator.errors import (
    ClusterError,
    ClusterUnavailable,
    Conflict,
    NotFound,
    SpecInvalid,
)
from octavo_operator.objects import kinds
from octavo_operator.reasons import Reason
from octavo_operator.report.events import by_verb
from octavo_operator.report.faults import Fault, refusal
from octavo_operator.report.reporter import Reported, Reporter
from octavo_operator.report.status import (
    flip_from_status,
    prefill_scaling_from_status,
    rollout_from_status,
    scaling_from_status,
)
from octavo_operator.requeue import again_after, retry_of
from octavo_operator.watch.reread import reread_children, reread_deployment
from octavo_operator.watch.work_queue import KeyOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.cluster.execute import Report
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.observed import DeploymentKey, Observed
    from octavo_operator.errors import NameConflict
    from octavo_operator.objects.kinds import Kind, Object
    from octavo_operator.report.events import EventRecorder
    from octavo_operator.routers.poller import RouterDemand
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.snapshot import ReconcileSnapshot
    from octavo_operator.spec import LLMDeployment
    from octavo_operator.watch.world import World

logger = logging.getLogger("octavo.operator.reconcile")


class _Outdated(Exception):
    """The LLMDeployment was edited or deleted since the watch reported it."""

    def __init__(self, *, is_gone: bool) -> None:
        super().__init__("deleted" if is_gone else "edited")
        self.outcome = KeyOutcome(is_gone=True) if is_gone else KeyOutcome(again_after_s=0.0)


@dataclass(slots=True)
class _Memory:
    """What helps the next reconcile of a key. Losing it costs a window or a write, no more."""

    key: DeploymentKey
    reported: Reported
    decision: DecisionMemory = field(default_factory=DecisionMemory)
    settled: dict[tuple[Kind, str], tuple[str, str]] = field(default_factory=dict)
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
        memory = self._memory(key, kinds.uid_of(body))
        try:
            return await self._reconcile(body, memory)
        except _Outdated as outdated:
            return outdated.outcome
        except NotLeader:
            return KeyOutcome()  # the leader reconciles every key
        except ClusterError as error:
            return await self._fail(key, error)

    async def _reconcile(self, body: Object, memory: _Memory) -> KeyOutcome:
        before = memory.decision
        try:
            accepted = accept(body, self._world.taken_names(memory.key), self.settings)
            snapshot = self._decide(body, accepted, memory)
        except SpecInvalid as error:
            return await self._refuse(body, error, memory)
        snapshot = await self._confirm(body, snapshot, memory, before)
        # Decisions are stored before they are executed: a restart between the two finds them, and
        # comes to the same conclusions.
        faults = [_conflict(error) for error in snapshot.plan.conflicts]
        if _has_new_decision(snapshot, body.get("status") or {}):
            await self._report(body, snapshot, memory, faults)
        report = await self._execute(snapshot, memory)
        faults += _faults_of(report)
        await self._set_gates(snapshot.observed.pods, memory)
        for reason, text in by_verb(snapshot.plan.details).items():
            await self._events.record(body, "Normal", reason, text)
        await self._record_trials(body, snapshot)
        if not snapshot.plan.is_empty:
            snapshot = self._decide(body, accepted, memory, has_scaled=True)
        await self._report(self._world.deployment(memory.key) or body, snapshot, memory, faults)
        return KeyOutcome(
            is_failed=bool(report.absent or report.refused),
            again_after_s=again_after(snapshot, memory.reported.loading, faults),
        )

    def _decide(
        self, body: Object, accepted: Accepted, memory: _Memory, *, has_scaled: bool = False
    ) -> ReconcileSnapshot:
        """Writes nothing but memory. Raises SpecInvalid as `decide` does."""
        inputs = self._gather(body, accepted, memory, has_scaled=has_scaled)
        decision = decide(inputs)
        memory.decision = decision.memory
        self._slots.note(memory.key, holds_slot=decision.holds_slot)
        return decision.snapshot

    def _gather(
        self, body: Object, accepted: Accepted, memory: _Memory, *, has_scaled: bool
    ) -> DecisionInputs:
        """Everything that the decision reads, as it is now."""
        key, pool, demand = memory.key, accepted.deployment.pool, self._demand
        status = (self._world.deployment(key) or body).get("status") or {}
        observed = self._world.observe(key)
        rollout = rollout_from_status(status)
        signals, prefill_signals = self._signals(accepted.deployment, observed)
        return DecisionInputs(
            accepted=accepted,
            settings=self.settings,
            owner_uid=kinds.uid_of(body),
            status=status,
            rollout=rollout,
            scaling=scaling_from_status(status),
            prefill_scaling=prefill_scaling_from_status(status),
            last_flip=flip_from_status(status),
            observed=observed,
            adapters=self._world.adapter_claims(key),
            slot=self._slots.slot(key, most=self.settings.max_rollouts),
            in_flight=demand.in_flight(pool),
            signals=signals,
            prefill_signals=prefill_signals,
            flip_signals=demand.flip_signals(pool) if accepted.deployment.flips else FlipSignals(),
            canary_totals=demand.canary_totals(pool, rollout),
            adapter_totals={
                one.name: demand.adapter_totals(pool, one.canary.of, one.name)
                for one in accepted.deployment.adapters
                if one.canary is not None
            },
            loaded_adapters=demand.adapter_holders(pool).keys(),
            memory=memory.decision,
            settled=memory.settled,
            has_scaled=has_scaled,
            now=self._clock(),
            epoch_now=self._epoch_clock(),
            now_text=self._now_text(),
        )

    def _signals(
        self, deployment: LLMDeployment, observed: Observed
    ) -> tuple[LoadSignals, LoadSignals]:
        """The load of the pods that answer now, and of those that compute prompts, where it
        decides."""
        pool = deployment.pool
        num_answering, num_computing = flip.count_sides(observed)
        pods = frozenset(
            kinds.uid_of(pod) for pod in flip.pods_of_both(observed) if flip.computes_prompts(pod)
        )
        answering, prefilling = LoadSignals(), LoadSignals()
        if autoscale.reads_signals(deployment):
            answering = self._demand.signals(pool, serving=num_answering, without=pods)
        if prefill.reads_signals(deployment):
            prefilling = self._demand.prefill_signals(pool, serving=num_computing, pods=pods)
        return answering, prefilling

    async def _confirm(
        self, body: Object, snapshot: ReconcileSnapshot, memory: _Memory, before: DecisionMemory
    ) -> ReconcileSnapshot:
        """The snapshot to execute: watches may lag, so that a write is checked against the API
        server before, and a deletion decided again on objects read anew. `before`: what the first
        decision knew of earlier ones, since it is not carried out then. Raises _Outdated."""
        if snapshot.plan.is_empty:
            return snapshot
        newest = await reread_deployment(self._cluster, self._world, body)
        if newest is None or _version(newest) != _version(body):
            memory.decision = before
            raise _Outdated(is_gone=newest is None)
        if not snapshot.plan.is_destructive:
            return snapshot
        await reread_children(self._cluster, self._world, memory.key)
        memory.decision = before
        return self._decide(body, snapshot.accepted, memory)

    async def _execute(self, snapshot: ReconcileSnapshot, memory: _Memory) -> Report:
        report = await execute(
            self._cluster,
            self._world,
            snapshot.plan,
            namespace=memory.key.namespace,
            pods=flip.pods_of_both(snapshot.observed),
        )
        memory.settled.update(report.settled)
        return report

    async def _set_gates(self, pods: Sequence[Object], memory: _Memory) -> None:
        holders = {uid: self._demand.holders(uid) for uid in map(kinds.uid_of, pods)}
        changes = readiness_gate.decide_all(pods, holders, memory.held_since, self._clock())
        memory.held_since = changes.held_since
        await set_gates(self._cluster, self._world, changes.gates, now_text=self._now_text)

    async def _record_trials(self, body: Object, snapshot: ReconcileSnapshot) -> None:
        for event in snapshot.trials.events:
            if event.is_promoted:
                await self._events.record(body, "Normal", Reason.ADAPTER_PROMOTED, event.text)
            else:
                await self._events.record(body, "Warning", Reason.ADAPTER_ROLLED_BACK, event.text)

    async def _refuse(self, body: Object, error: SpecInvalid, memory: _Memory) -> KeyOutcome:
        """Neither this spec nor an earlier one can be carried out: what runs is left alone."""
        generation = int(body["metadata"].get("generation") or 0)
        await self._set_gates(self._world.observe(memory.key).pods, memory)
        await self._reporter.refuse(body, generation, Reason(error.reason), str(error))
        return KeyOutcome(again_after_s=retry_of(error))

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

    async def _fail(self, key: DeploymentKey, error: ClusterError) -> KeyOutcome:
        problem = {"key": str(key), "error": str(error)}
        if isinstance(error, ClusterUnavailable):
            logger.warning("Backed off", extra=problem)
            return KeyOutcome(is_failed=True, again_after_s=error.retry_after_s)
        if isinstance(error, Conflict | NotFound):
            # The cache is old; the event that updates it is on its way.
            logger.info("Read again", extra=problem)
            await self._reread(key)
        else:
            logger.warning("Refused", extra=problem)
        return KeyOutcome(is_failed=True)

    async def _reread(self, key: DeploymentKey) -> None:
        try:
            await reread_children(self._cluster, self._world, key)
            if (body := self._world.deployment(key)) is not None:
                await reread_deployment(self._cluster, self._world, body)
        except ClusterError as error:
            logger.warning("Could not read again", extra={"key": str(key), "error": str(error)})

    def _memory(self, key: DeploymentKey, uid: str) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.reported.uid != uid:
            memory = self._memories[key] = _Memory(key, Reported(uid))
        return memory

    def _forget(self, key: DeploymentKey) -> None:
        if (memory := self._memories.pop(key, None)) is not None:
            self._reporter.forget(memory.reported)
        self._demand.forget(f"{key.namespace}/{key.name}")
        self._slots.note(key, holds_slot=False)


def _version(body: Object) -> tuple[str, int]:
    return kinds.uid_of(body), int(body["metadata"].get("generation") or 0)


def _has_new_decision(snapshot: ReconcileSnapshot, status: Object) -> bool:
    """A step of the rollout, a number of replicas, a flip or a trial that is not stored yet."""
    if snapshot.capacity.state != rollout_from_status(status):
        return True
    if list(snapshot.trials.trials) != trials_from_status(status):
        return True
    scaling, prefill_scaling = snapshot.scaling, snapshot.prefill_scaling
    if snapshot.last_flip is not None and snapshot.last_flip != flip_from_status(status):
        return True
    return (scaling is not None and scaling != scaling_from_status(status)) or (
        prefill_scaling is not None and prefill_scaling != prefill_scaling_from_status(status)
    )


def _conflict(error: NameConflict) -> Fault:
    return Fault(Reason.NAME_CONFLICT, str(error))


def _faults_of(report: Report) -> list[Fault]:
    faults = [_conflict(error) for error in report.conflicts]
    for body, why in report.refused:
        subject = f"{body['kind']} {kinds.name_of(body)}"
        faults.append(Fault(refusal(why.message, why.status), why.message, subject))
    return faults
