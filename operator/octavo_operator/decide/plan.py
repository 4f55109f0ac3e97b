"""What to do now: desired objects against observed ones, and the next step of capacity.

Pure: no client, no clock. `plan_capacity` knows replicas and revisions only, so that processes can
take the place of pods; `plan_changes` adds the objects of a cluster.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import (
    ENGINE_COMPONENT,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    PREFILL_COMPONENT,
    REVISION_LABEL,
)
from octavo_operator.decide import canary
from octavo_operator.decide.canary import HOLD, CanaryState, CanaryVerdict
from octavo_operator.decide.flip import NO_FLIPS, FlipDecision
from octavo_operator.decide.group import (
    group_policies,
    missing_workers,
    orphans,
    unlabelled_leaders,
)
from octavo_operator.decide.observed import component_of
from octavo_operator.decide.rollout import (
    RevisionGroup,
    RevisionReplica,
    RolloutLimits,
    RolloutStep,
    limits_of,
    next_step,
    recreate_step,
    victims,
)
from octavo_operator.errors import NameConflict
from octavo_operator.objects import kinds
from octavo_operator.objects.compare import holds
from octavo_operator.spec.traffic import RolloutSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Kind, Object

FINGERPRINT_ANNOTATION = "octavo.dev/fingerprint"  # of the object as it was last applied


@dataclass(frozen=True, slots=True)
class Target:
    """What the spec says about capacity, once everything is resolved."""

    revision: str
    replicas: int
    rollout: RolloutSpec = field(default_factory=RolloutSpec)

    @property
    def limits(self) -> RolloutLimits:
        return limits_of(self.replicas, self.rollout.max_surge, self.rollout.max_unavailable)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Targets by revision to write now, and the rollout's state."""

    step: RolloutStep
    state: CanaryState
    weights: dict[str, int] = field(default_factory=dict)  # percent by revision; empty: no canary
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """Another number of replicas for one revision. `leaving` are those who should go first."""

    revision: str
    name: str
    uid: str
    resource_version: str
    was: int
    replicas: int
    leaving: tuple[str, ...] = ()  # pod UIDs
    component: str = ENGINE_COMPONENT

    @property
    def detail(self) -> str:
        side = "prefill of " if self.component == PREFILL_COMPONENT else ""
        return f"Scaled {side}revision {self.revision} from {self.was} to {self.replicas}"


@dataclass(frozen=True, slots=True)
class SideStep:
    """The next step of the pods that answer, or of the prefill pods."""

    step: RolloutStep
    observed: Observed
    replicas: Sequence[RevisionReplica] = ()


@dataclass(frozen=True, slots=True)
class ReconcilePlan:
    """In the order in which it is carried out; every prefix leaves what was promised."""

    apply: tuple[Object, ...] = ()
    label: tuple[tuple[Object, dict[str, str]], ...] = ()  # pods, and what they lack
    scale: tuple[ScaleOrder, ...] = ()
    delete: tuple[Object, ...] = ()
    hold: tuple[str, ...] = ()  # what has to happen elsewhere first
    conflicts: tuple[NameConflict, ...] = ()  # objects that are not ours, and are left alone
    details: tuple[str, ...] = ()  # what is done and why, for logs and events
    requeue_after_s: float | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.apply or self.label or self.scale or self.delete)

    @property
    def is_destructive(self) -> bool:
        return bool(self.delete) or any(order.replicas < order.was for order in self.scale)


def plan_capacity(
    target: Target,
    groups: Sequence[RevisionGroup],
    state: CanaryState,
    *,
    verdict: CanaryVerdict = HOLD,
    now: float = 0.0,
) -> CapacityPlan:
    """The next step of the rollout. `state` comes from the status, and goes back there."""
    if target.rollout.strategy == "Canary":
        state = _with_stable(target, groups, state)
        if _is_on_trial(target, groups, state):
            return _plan_canary(target, groups, state, verdict, now)
    if target.rollout.strategy == "Recreate":
        step = recreate_step(target.limits, target.revision, groups)
    else:
        step = next_step(target.limits, {target.revision: target.replicas}, groups)
    return CapacityPlan(step, _settled(state, target, step))


def _with_stable(
    target: Target, groups: Sequence[RevisionGroup], state: CanaryState
) -> CanaryState:
    """Until a first rollout has ended, and after the status was lost, nothing names the stable
    revision: it is the one that serves most, unless that is the wanted one."""
    if any(group.revision == state.stable for group in groups):
        return state
    most = max(groups, key=lambda g: (g.serving, g.revision != target.revision), default=None)
    if most is None or not most.serving or most.revision == target.revision:
        return state
    return replace(state, stable=most.revision)


def _is_on_trial(target: Target, groups: Sequence[RevisionGroup], state: CanaryState) -> bool:
    """Where the stable revision serves, another one is judged against it; where it does not, an
    edit is not. A trial or a rejection outlives a time without replicas."""
    if target.revision == state.stable:
        return False
    stable = next((group for group in groups if group.revision == state.stable), None)
    if stable is None:
        return False
    is_known = target.revision in (state.revision, state.rejected)
    return is_known or (stable.target > 0 and target.replicas > 0)


def _plan_canary(
    target: Target,
    groups: Sequence[RevisionGroup],
    state: CanaryState,
    verdict: CanaryVerdict,
    now: float,
) -> CapacityPlan:
    by_name = {group.revision: group for group in groups}
    limits, rules = target.limits, target.rollout.canary
    details: list[str] = []
    if state.rejected != target.revision:
        begun = canary.begin(state, target.revision)
        if begun != state:
            details.append(f"Began a canary of revision {target.revision}")
            verdict = HOLD
        state = begun
        if not canary.is_complete(state, rules):
            # The stable revision may be short of replicas: that must not hold up its successor.
            share = canary.shares(limits, rules, state)[target.revision]
            in_place = target.revision in by_name and by_name[target.revision].serving >= share > 0
            after = canary.advance(state, rules, verdict, now, is_in_place=in_place)
            if after.rejected:
                details.append(f"Rolled back revision {target.revision}: {after.message}")
            elif after.step != state.step:
                details.append(f"Moved the canary to step {after.step + 1}")
            state = after
    if state.rejected == target.revision:
        step = next_step(limits, {state.stable: limits.replicas}, groups)
        return CapacityPlan(step, state, {}, tuple(details))
    step = next_step(limits, canary.shares(limits, rules, state), groups)
    if canary.is_complete(state, rules):
        return CapacityPlan(step, _settled(state, target, step), {}, tuple(details))
    trial = by_name.get(target.revision)
    # Until the canary serves, all traffic is the stable revision's.
    shown = canary.weights(rules, state) if trial is not None and trial.serving else {}
    return CapacityPlan(step, state, shown or {state.stable: 100}, tuple(details))


def _settled(state: CanaryState, target: Target, step: RolloutStep) -> CanaryState:
    """A finished rollout makes its revision the stable one."""
    if not step.is_done:
        if state.revision and state.revision != target.revision:  # the trial was called off
            return CanaryState(stable=state.stable)
        if state.rejected and state.rejected != target.revision:
            return replace(state, rejected="", message="")
        return state
    return CanaryState(stable=target.revision)


def plan_changes(
    desired: Sequence[Object],
    observed: Observed,
    capacity: CapacityPlan,
    *,
    owner_uid: str,
    owner_name: str,
    revision: str,
    replicas: Sequence[RevisionReplica] = (),
    prefill: SideStep | None = None,
    flips: FlipDecision = NO_FLIPS,
    settled: Mapping[tuple[Kind, str], tuple[str, str]] | None = None,
    waiting_for: str = "",
    isolates_groups: bool = True,
) -> ReconcilePlan:
    """Everything to write, in order. `settled` names objects that came back from the server
    unchanged after an apply: (fingerprint, generation), so that what the server stores in another
    form is not written for ever. No engine is made or changed while an object that comes before it
    is not ours; those that run are still scaled. `waiting_for`: what its rollout waits for, if it
    may not begin. `isolates_groups`: a NetworkPolicy for each group."""
    sides = [SideStep(capacity.step, observed, replicas), *([prefill] if prefill else [])]
    targets = {side.observed.component: side.step.targets for side in sides}
    applies: list[Object] = []
    hold: list[str] = []
    conflicts: list[NameConflict] = []
    details = [*capacity.details, *flips.details]
    for wanted in desired:
        kind, name = kinds.kind_of(wanted), kinds.name_of(wanted)
        body = marked(wanted)
        found = observed.children.get((kind, name))
        is_engine = kind == kinds.DEPLOYMENT and REVISION_LABEL in kinds.labels_of(wanted)
        if is_engine and conflicts:
            continue
        if found is None:
            if is_engine:
                target = targets.get(component_of(wanted), {}).get(revision, 0)
                if not target:
                    continue
                body = with_replicas(body, target)
            applies.append(body)
            details.append(f"Created {kind.name} {name}")
            continue
        if kinds.controller_uid(found) != owner_uid:
            if is_of_predecessor(found, owner_name):
                hold.append(f"{kind.name} {name} of a deleted LLMDeployment to vanish")
                continue
            conflicts.append(NameConflict(kind.name, name, owner_text(found)))
            continue
        if found["metadata"].get("deletionTimestamp"):
            hold.append(f"{kind.name} {name} to be deleted")
            continue
        if is_engine:
            body = with_replicas(body, int(found["spec"].get("replicas", 1)))
        if is_current(body, found, settled):
            continue
        applies.append(body)
        details.append(f"Updated {kind.name} {name}")
    if not conflicts:
        of_groups = _plan_groups(observed, settled, isolates_groups=isolates_groups)
        applies += of_groups
        details += map(_detail_of_group, of_groups)
    scales = _plan_scales(sides, owner_uid)
    details += [order.detail for order in scales]
    deletes = _plan_deletes(desired, observed, sides, owner_uid) + orphans(observed)
    details += [f"Deleted {body['kind']} {kinds.name_of(body)}" for body in deletes]
    hold += filter(None, [*(side.step.waiting_for for side in sides), waiting_for])
    return ReconcilePlan(
        tuple(applies), (*unlabelled_leaders(observed), *flips.moves), tuple(scales),
        tuple(deletes), tuple(hold), tuple(conflicts), tuple(details),
    )  # fmt: skip


def _plan_groups(
    observed: Observed,
    settled: Mapping[tuple[Kind, str], tuple[str, str]] | None,
    *,
    isolates_groups: bool,
) -> list[Object]:
    """What belongs to leaders, to apply: policies before the workers that need them."""
    policies = map(marked, group_policies(observed) if isolates_groups else ())
    stale = []
    for policy in policies:
        found = observed.children.get((kinds.NETWORK_POLICY, kinds.name_of(policy)))
        if found is None or not is_current(policy, found, settled):
            stale.append(policy)
    return stale + [marked(worker) for worker in missing_workers(observed)]


def _detail_of_group(body: Object) -> str:
    leader = body["metadata"]["ownerReferences"][0]["name"]
    what = "worker" if body["kind"] == kinds.DEPLOYMENT.name else body["kind"]
    return f"Created {what} {kinds.name_of(body)} of pod {leader}"


def marked(wanted: Object) -> Object:
    """A desired object as it is applied: with a fingerprint, so that a removed field is noticed."""
    annotations = {**kinds.annotations_of(wanted), FINGERPRINT_ANNOTATION: fingerprint(wanted)}
    return {**wanted, "metadata": {**wanted["metadata"], "annotations": annotations}}


def fingerprint(body: Object) -> str:
    """Of all we would write but the number of replicas, which has its own path."""
    text = json.dumps(_without_replicas(body), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_replicas(body: Object, replicas: int) -> Object:
    return {**body, "spec": {**body["spec"], "replicas": replicas}}


def is_current(
    body: Object, found: Object, settled: Mapping[tuple[Kind, str], tuple[str, str]] | None
) -> bool:
    """Nothing of ours was removed (the fingerprint) nor changed by others (what is there)."""
    mark = kinds.annotations_of(body)[FINGERPRINT_ANNOTATION]
    if kinds.annotations_of(found).get(FINGERPRINT_ANNOTATION) != mark:
        return False
    if holds(found, body):
        return True
    seen = (settled or {}).get((kinds.kind_of(body), kinds.name_of(body)))
    return seen == (mark, stamp(found))


def stamp(found: Object) -> str:
    """Changes with what we own of it: status updates do not count where the server counts specs."""
    meta = found["metadata"]
    return f"{meta.get('uid')}/{meta.get('generation') or meta.get('resourceVersion')}"


def is_of_predecessor(found: Object, owner_name: str) -> bool:
    """Belongs to an LLMDeployment of this name that was deleted: the garbage collector's."""
    return any(
        owner.get("kind") == kinds.LLM_DEPLOYMENT.name and owner.get("name") == owner_name
        for owner in found["metadata"].get("ownerReferences") or []
    )


def _plan_scales(sides: Sequence[SideStep], owner_uid: str) -> list[ScaleOrder]:
    orders = [order for side in sides for order in _scales_of(side, owner_uid)]
    return sorted(orders, key=lambda order: order.replicas < order.was)  # increases first


def _scales_of(side: SideStep, owner_uid: str) -> list[ScaleOrder]:
    orders, observed = [], side.observed
    for revision, target in side.step.targets.items():
        body = observed.engines.get(revision)
        if body is None or kinds.controller_uid(body) != owner_uid:
            continue
        was = observed.targets[revision]
        if was == target:
            continue
        own = [replica for replica in side.replicas if replica.revision == revision]
        staying = sum(not replica.is_leaving for replica in own)
        leaving = victims(own, staying - target) if target else []
        orders.append(
            ScaleOrder(
                revision=revision,
                name=kinds.name_of(body),
                uid=kinds.uid_of(body),
                resource_version=str(body["metadata"]["resourceVersion"]),
                was=was,
                replicas=target,
                leaving=tuple(replica.id for replica in leaving),
                component=observed.component,
            )
        )
    return orders


def _plan_deletes(
    desired: Sequence[Object], observed: Observed, sides: Sequence[SideStep], owner_uid: str
) -> list[Object]:
    """Objects of ours that are no longer desired. Never a volume: data is the user's to delete."""
    wanted = {(kinds.kind_of(body), kinds.name_of(body)) for body in desired}
    vanished = {(side.observed.component, name) for side in sides for name in side.step.vanished}
    there = {(side.observed.component, name) for side in sides for name in side.observed.engines}
    alive = there - vanished
    deletes = []
    for (kind, name), body in observed.children.items():
        if kind == kinds.VOLUME_CLAIM or kind not in kinds.OWNED:
            continue
        if kinds.controller_uid(body) != owner_uid:
            continue
        if kinds.labels_of(body).get(MANAGED_BY_LABEL) != MANAGED_BY:
            continue
        if body["metadata"].get("deletionTimestamp"):
            continue
        revision = kinds.labels_of(body).get(REVISION_LABEL, "")
        place = (component_of(body), revision)
        if kind == kinds.DEPLOYMENT and revision:
            if place in vanished:
                deletes.append(body)
            continue
        if (kind, name) in wanted or place in alive:
            continue
        deletes.append(body)
    return sorted(deletes, key=lambda body: -kinds.OWNED.index(kinds.kind_of(body)))


def _without_replicas(body: Object) -> Any:
    if body["kind"] != kinds.DEPLOYMENT.name:
        return body
    return {**body, "spec": {k: v for k, v in body["spec"].items() if k != "replicas"}}


def owner_text(found: Object) -> str:
    """The owner of an object, for messages; empty if it has none."""
    owners = found["metadata"].get("ownerReferences") or []
    if not owners:
        return ""
    return f"{owners[0].get('kind')} {owners[0].get('name')}"
