"""The status: replica counts, the rollout's progress, and five conditions.

Computed whole from what is; written only where it differs. A condition's transition time moves when
its status flips, not when its words change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from octavo_operator.decide.autoscale import Scaling
from octavo_operator.decide.canary import CanaryState
from octavo_operator.decide.flip import LastFlip
from octavo_operator.reasons import Reason, explain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_operator.decide.adapter_trials import AdapterTrial
    from octavo_operator.decide.rollout import RevisionReplica
    from octavo_operator.objects.kinds import Object
    from octavo_operator.report.faults import Fault
    from octavo_operator.report.loading import LoadingState

Truth = Literal["True", "False", "Unknown"]
MAX_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the conditions are made of."""

    generation: int
    revision: str
    wanted: int  # replicas
    least_serving: int
    is_suspended: bool = False
    is_done: bool = False  # every replica has the revision and serves
    waiting_for: str = ""
    replicas: Sequence[RevisionReplica] = ()
    prefill: Sequence[RevisionReplica] = ()
    wanted_prefill: int | None = None  # None: the spec has no prefill pods
    faults: Sequence[Fault] = ()
    loading: LoadingState | None = None
    model: Mapping[str, object] = field(default_factory=dict)  # what was found of it
    canary: CanaryState = field(default_factory=CanaryState)
    weights: Mapping[str, int] = field(default_factory=dict)
    stalled_s: float = 0.0  # without progress of an unfinished rollout
    progress_deadline_s: float = 900.0
    scaling: Scaling | None = None
    prefill_scaling: Scaling | None = None
    sides: tuple[int, int] | None = None  # pods that answer, and that compute; None: none change
    last_flip: LastFlip | None = None
    accepted: Mapping[str, object] = field(default_factory=dict)  # the spec that is carried out
    refusal: Fault | None = None  # why the written spec is not the one
    unknown: Sequence[str] = ()  # its fields that this version leaves out
    selector: str = ""
    endpoint: str = ""
    adapters: Sequence[Mapping[str, object]] = ()  # each with where it is loaded
    trials: Sequence[AdapterTrial] = ()  # of adapters


@dataclass(frozen=True, slots=True)
class StatusCondition:
    type: str
    status: Truth
    reason: Reason
    message: str


def summarize(facts: Facts, previous: Mapping[str, object], now: str) -> Object:
    """The whole status. `now` is an RFC 3339 time; `previous` the status as it is."""
    staying = [replica for replica in facts.replicas if not replica.is_leaving]
    routable = sum(replica.routable for replica in staying)
    conditions = [
        _accepted(facts),
        _model_ready(facts, staying),
        _progressing(facts),
        _degraded(facts, routable),
        _ready(facts, routable),
    ]
    status: Object = {
        "observedGeneration": facts.generation,
        **_counts(staying, facts.revision),
        "selector": facts.selector,
        "endpoint": facts.endpoint,
        "revision": facts.revision,
        "revisions": _revisions(facts, staying),
        "conditions": merge_conditions(conditions, previous, facts.generation, now),
    }
    prefill = [replica for replica in facts.prefill if not replica.is_leaving]
    if prefill or facts.wanted_prefill is not None:
        status["prefill"] = _counts(prefill, facts.revision)
        if facts.prefill_scaling is not None:
            status["prefill"]["autoscaling"] = _scaling_to_status(facts.prefill_scaling)
        if facts.sides is not None:
            status["prefill"]["flip"] = _flip_to_status(facts.sides, facts.last_flip)
    if facts.accepted:
        status["accepted"] = dict(facts.accepted)
    if facts.loading is not None:
        status["loading"] = facts.loading.to_status()
    if facts.model:
        status["model"] = dict(facts.model)
    if facts.adapters:
        status["adapters"] = [dict(entry) for entry in facts.adapters]
    if facts.trials:
        status["adapterTrials"] = [trial.to_status() for trial in facts.trials]
    rollout = rollout_to_status(facts.canary, facts.weights.get(facts.canary.revision, 0))
    if rollout:
        status["rollout"] = rollout
    if facts.scaling is not None:
        status["autoscaling"] = _scaling_to_status(facts.scaling)
    return status


def _counts(staying: Sequence[RevisionReplica], revision: str) -> Object:
    return {
        "replicas": len(staying),
        "readyReplicas": sum(replica.ready for replica in staying),
        "routableReplicas": sum(replica.routable for replica in staying),
        "updatedReplicas": sum(replica.revision == revision for replica in staying),
    }


def refused(
    generation: int, reason: Reason, message: str, previous: Mapping[str, object], now: str
) -> Object:
    """The status where no spec can be carried out, nor was one before."""
    text = explain(reason, message)
    conditions = [StatusCondition("Accepted", "False", reason, text)]
    old = {c["type"]: c for c in _conditions(previous)}
    was_ready = old.get("Ready", {}).get("status") == "True"
    if not was_ready:
        conditions.append(StatusCondition("Ready", "False", reason, text))
    conditions.append(StatusCondition("Progressing", "False", reason, text))
    kept = {c.type for c in conditions}
    merged = merge_conditions(conditions, previous, generation, now)
    merged += [old[name] for name in old if name not in kept]
    return {
        **{key: value for key, value in previous.items() if key != "conditions"},
        "observedGeneration": generation,
        "conditions": sorted(merged, key=lambda c: _ORDER.index(c["type"])),
    }


_ORDER = ("Accepted", "ModelReady", "Progressing", "Degraded", "Ready")


def merge_conditions(
    conditions: Sequence[StatusCondition], previous: Mapping[str, object], generation: int, now: str
) -> list[Object]:
    """As they are stored; the time of the last flip is kept."""
    old = {c.get("type"): c for c in _conditions(previous)}
    merged = []
    for condition in conditions:
        before = old.get(condition.type)
        is_flip = before is None or before.get("status") != condition.status
        since = now if is_flip or before is None else before.get("lastTransitionTime", now)
        merged.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": str(condition.reason),
                "message": condition.message[:MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": since,
            }
        )
    return merged


def rollout_to_status(state: CanaryState, weight: int = 0) -> Object:
    """Only what is not at its default."""
    fields: Object = {
        "stable": state.stable,
        "revision": state.revision,
        "step": state.step,
        "stepStartedAt": state.step_started_at,
        "rejected": state.rejected,
        "message": state.message[:MAX_MESSAGE],
        "weight": weight,
    }
    return {key: value for key, value in fields.items() if value}


def rollout_from_status(status: Mapping[str, object]) -> CanaryState:
    """Tolerant: the status may have been edited or emptied."""
    stored = status.get("rollout")
    if not isinstance(stored, dict):
        return CanaryState()
    step, started = stored.get("step"), stored.get("stepStartedAt")
    return CanaryState(
        stable=str(stored.get("stable") or ""),
        revision=str(stored.get("revision") or ""),
        step=step if isinstance(step, int) and step >= 0 else 0,
        step_started_at=float(started) if isinstance(started, int | float) else 0.0,
        rejected=str(stored.get("rejected") or ""),
        message=str(stored.get("message") or ""),
    )


def _scaling_to_status(scaling: Scaling) -> Object:
    return {
        "replicas": scaling.replicas,
        "reason": scaling.reason[:512],
        "changedAt": scaling.changed_at,
    }


def prefill_scaling_from_status(status: Mapping[str, object]) -> Scaling | None:
    stored = status.get("prefill")
    return scaling_from_status(stored) if isinstance(stored, dict) else None


def _flip_to_status(sides: tuple[int, int], last: LastFlip | None) -> Object:
    found: Object = {"answering": sides[0], "computing": sides[1]}
    if last is not None:
        found |= {"reason": last.reason[:512], "changedAt": last.changed_at}
    return found


def flip_from_status(status: Mapping[str, object]) -> LastFlip | None:
    """Tolerant, as above."""
    prefill = status.get("prefill")
    stored = prefill.get("flip") if isinstance(prefill, dict) else None
    if not isinstance(stored, dict) or not stored.get("changedAt"):
        return None
    return LastFlip(str(stored.get("reason") or ""), str(stored["changedAt"]))


def scaling_from_status(status: Mapping[str, object]) -> Scaling | None:
    """Tolerant, as above. `status`: the whole, or what it says of one side."""
    stored = status.get("autoscaling")
    replicas = stored.get("replicas") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or not isinstance(replicas, int) or replicas < 0:
        return None
    return Scaling(replicas, str(stored.get("reason") or ""), str(stored.get("changedAt") or ""))


def _revisions(facts: Facts, replicas: Sequence[RevisionReplica]) -> list[Object]:
    entries = []
    for name in sorted({replica.revision for replica in replicas}):
        own = [replica for replica in replicas if replica.revision == name]
        entry: Object = {
            "name": name,
            "replicas": len(own),
            "readyReplicas": sum(replica.ready for replica in own),
            "routableReplicas": sum(replica.routable for replica in own),
        }
        if facts.weights:
            entry["weight"] = facts.weights.get(name, 0)
        entries.append(entry)
    return entries[:16]


def _accepted(facts: Facts) -> StatusCondition:
    if facts.refusal is not None:
        generation = facts.accepted.get("generation")
        text = f"{facts.refusal.message} The spec of generation {generation} is carried out."
        return StatusCondition("Accepted", "False", facts.refusal.reason, text)
    for fault in facts.faults:
        if fault.reason == Reason.NAME_CONFLICT:
            return StatusCondition("Accepted", "False", fault.reason, fault.message)
    if facts.unknown:
        names = ", ".join(facts.unknown[:8])
        text = explain(Reason.UNSUPPORTED_VERSION, f"The spec is valid but for {names}, left out")
        return StatusCondition("Accepted", "True", Reason.ACCEPTED, text)
    return StatusCondition("Accepted", "True", Reason.ACCEPTED, "The spec is valid.")


def _model_ready(facts: Facts, replicas: Sequence[RevisionReplica]) -> StatusCondition:
    if any(r.ready for r in replicas if r.revision == facts.revision):
        return StatusCondition(
            "ModelReady", "True", Reason.MODEL_LOADED, "The engines have loaded the model."
        )
    for fault in facts.faults:
        if fault.reason.value.startswith("Model"):
            return StatusCondition("ModelReady", "False", fault.reason, fault.message)
    phase = facts.loading.phase if facts.loading else "Pending"
    if phase == "Fetching":
        text = _how_far(facts) or "The model is being fetched."
        return StatusCondition("ModelReady", "False", Reason.FETCHING_MODEL, text)
    if phase == "Loading":
        text = _how_far(facts) or "Engines are loading the model."
        return StatusCondition("ModelReady", "False", Reason.LOADING_MODEL, text)
    if facts.wanted == 0:
        return StatusCondition("ModelReady", "Unknown", _zero(facts), _ZERO_TEXT[_zero(facts)])
    return StatusCondition("ModelReady", "False", Reason.STARTING, "No engine has started yet.")


def _progressing(facts: Facts) -> StatusCondition:
    if facts.canary.rejected == facts.revision:
        text = explain(Reason.CANARY_REJECTED, facts.canary.message)
        return StatusCondition("Progressing", "False", Reason.CANARY_REJECTED, text)
    if facts.is_done:
        return StatusCondition(
            "Progressing", "False", Reason.COMPLETE, "All replicas have the current revision."
        )
    waiting = facts.waiting_for or "replicas to change"
    if facts.stalled_s >= facts.progress_deadline_s:
        text = explain(
            Reason.PROGRESS_DEADLINE_EXCEEDED,
            f"No change for {facts.progress_deadline_s:.0f} s while waiting for {waiting}",
        )
        return StatusCondition("Progressing", "False", Reason.PROGRESS_DEADLINE_EXCEEDED, text)
    if facts.canary.revision:
        weight = facts.weights.get(facts.revision, 0)
        text = (
            f"Revision {facts.revision} gets {weight} % of the traffic; waiting for its analysis."
        )
        return StatusCondition("Progressing", "True", Reason.CANARY_RUNNING, text)
    is_new = facts.canary.stable not in ("", facts.revision)
    reason = Reason.ROLLING_OUT if is_new else Reason.SCALING
    return StatusCondition("Progressing", "True", reason, f"Waiting for {waiting}.")


def _degraded(facts: Facts, routable: int) -> StatusCondition:
    """Something is wrong, whether or not requests still get through."""
    if facts.faults:
        fault = facts.faults[0]
        return StatusCondition("Degraded", "True", fault.reason, fault.message)
    if facts.canary.rejected == facts.revision:
        text = explain(Reason.CANARY_REJECTED, facts.canary.message)
        return StatusCondition("Degraded", "True", Reason.CANARY_REJECTED, text)
    if facts.stalled_s >= facts.progress_deadline_s and not facts.is_done:
        text = explain(
            Reason.PROGRESS_DEADLINE_EXCEEDED, f"Still waiting for {facts.waiting_for or 'pods'}"
        )
        return StatusCondition("Degraded", "True", Reason.PROGRESS_DEADLINE_EXCEEDED, text)
    if facts.refusal is not None:
        return StatusCondition("Degraded", "True", facts.refusal.reason, facts.refusal.message)
    return StatusCondition("Degraded", "False", Reason.AS_EXPECTED, "No problem was found.")


def _ready(facts: Facts, routable: int) -> StatusCondition:
    if facts.wanted == 0:
        reason = _zero(facts)
        return StatusCondition("Ready", "False", reason, _ZERO_TEXT[reason])
    total = f"{routable} of {facts.wanted} replicas serve{_prefill_text(facts)}"
    if routable and routable >= facts.least_serving:
        return StatusCondition("Ready", "True", Reason.SERVING, f"{total}.")
    fault = facts.faults[0] if facts.faults else None
    if routable:
        if fault is not None:
            return StatusCondition("Ready", "True", fault.reason, f"{total}. {fault.message}")
        return StatusCondition("Ready", "True", Reason.FEWER_REPLICAS, f"{total}.")
    if fault is not None:
        return StatusCondition("Ready", "False", fault.reason, fault.message)
    if facts.scaling is not None and facts.scaling.reason.startswith("Woken"):
        return StatusCondition("Ready", "False", Reason.WAKING, f"{facts.scaling.reason}.")
    phase = facts.loading.phase if facts.loading else "Pending"
    reason = {"Fetching": Reason.FETCHING_MODEL, "Loading": Reason.LOADING_MODEL}.get(
        phase, Reason.NO_REPLICA_READY
    )
    far = _how_far(facts)
    text = f"{far[0].lower()}{far[1:]}" if far else f"waiting for {facts.waiting_for or 'pods'}."
    return StatusCondition("Ready", "False", reason, f"{total}; {text}")


def _prefill_text(facts: Facts) -> str:
    if not facts.wanted_prefill:
        return ""
    if facts.sides is not None:
        return f"; {facts.sides[1]} of {sum(facts.sides)} pods compute prompts"
    routable = sum(replica.routable and not replica.is_leaving for replica in facts.prefill)
    return f", {routable} of {facts.wanted_prefill} compute prompts for them"


def _how_far(facts: Facts) -> str:
    """As a sentence; empty if no progress is reported."""
    return facts.loading.message if facts.loading is not None else ""


def _zero(facts: Facts) -> Reason:
    if facts.is_suspended:
        return Reason.SUSPENDED
    return Reason.SCALED_TO_ZERO


_ZERO_TEXT = {
    Reason.SUSPENDED: explain(Reason.SUSPENDED, "No replica runs because spec.suspend is set"),
    Reason.SCALED_TO_ZERO: "No replica runs.",
}


def _conditions(status: Mapping[str, object]) -> list[Object]:
    found = status.get("conditions")
    if not isinstance(found, list):
        return []
    return [c for c in found if isinstance(c, dict) and c.get("type") in _ORDER]
