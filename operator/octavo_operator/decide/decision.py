"""The whole decision about one LLMDeployment: from everything that was gathered to what to do.

Pure: `DecisionInputs` holds all that it reads, the times included. What the next decision needs of
this one is in `ReconcileDecision.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_operator.decide import adopt, autoscale, canary
from octavo_operator.decide.adapter_trials import decide_trials, trials_from_status
from octavo_operator.decide.adapters import decide_adapters
from octavo_operator.decide.autoscale import ScaleHistory, ScaleInputs
from octavo_operator.decide.flip import is_labelled, plan_flips
from octavo_operator.decide.plan import SideStep, Target, plan_capacity, plan_changes
from octavo_operator.decide.prefill import plan_prefill, wanted_prefill
from octavo_operator.decide.rollout_slots import admit
from octavo_operator.desired import Traffic, desired_objects
from octavo_operator.snapshot import ReconcileSnapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from octavo_engine.protocol.sides import SideHistory
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.adapter_trials import TrialBaseline, TrialDecision
    from octavo_operator.decide.adapters import AdapterClaim
    from octavo_operator.decide.autoscale import LoadSignals, ReplicaCount, Scaling
    from octavo_operator.decide.canary import CanaryBaseline, CanaryState, CanaryTotals
    from octavo_operator.decide.flip import FlipDecision, FlipSignals, LastFlip
    from octavo_operator.decide.observed import Observed
    from octavo_operator.decide.rollout_slots import RolloutSlot
    from octavo_operator.objects.kinds import Kind, Object
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment


@dataclass(frozen=True, slots=True)
class DecisionMemory:
    """What a decision needs of the earlier ones. Losing it costs a window, no more."""

    scale: ScaleHistory = field(default_factory=ScaleHistory)
    prefill_scale: ScaleHistory = field(default_factory=ScaleHistory)
    sides: Mapping[str, SideHistory] = field(default_factory=dict)  # by revision
    baseline: CanaryBaseline | None = None
    trials: Mapping[str, TrialBaseline] = field(default_factory=dict)  # by adapter on trial


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """Everything that a decision reads, gathered at one time."""

    accepted: Accepted
    settings: OperatorSettings
    owner_uid: str
    # As the status has it: what earlier decisions stored there.
    status: Object
    rollout: CanaryState
    scaling: Scaling | None
    prefill_scaling: Scaling | None
    last_flip: LastFlip | None
    # What there is in the cluster.
    observed: Observed
    adapters: Sequence[AdapterClaim]
    slot: RolloutSlot | None  # None: rollouts have no bound
    # What routers report.
    in_flight: Mapping[str, int]  # requests by pod UID
    signals: LoadSignals
    prefill_signals: LoadSignals  # of the prefill pods alone
    flip_signals: FlipSignals
    canary_totals: CanaryTotals
    adapter_totals: Mapping[str, CanaryTotals]  # by adapter on trial
    loaded_adapters: Collection[str]
    # What this process remembers.
    memory: DecisionMemory
    settled: Mapping[tuple[Kind, str], tuple[str, str]]
    has_scaled: bool  # the autoscalers have decided in this reconcile already
    now: float  # monotonic
    epoch_now: float
    now_text: str  # RFC 3339

    @property
    def deployment(self) -> LLMDeployment:
        return self.accepted.deployment


@dataclass(frozen=True, slots=True)
class ReconcileDecision:
    snapshot: ReconcileSnapshot
    memory: DecisionMemory
    holds_slot: bool  # its rollout counts among those that are under way


def decide(inputs: DecisionInputs) -> ReconcileDecision:
    """Raises SpecInvalid where a spec that was accepted before cannot be carried out any more."""
    deployment, observed, in_flight = inputs.deployment, inputs.observed, inputs.in_flight
    revision = adopt.current_revision(deployment, inputs.settings, observed, inputs.status)
    count = autoscale.wanted_replicas(
        deployment, _scale_inputs(inputs, inputs.scaling, inputs.memory.scale, inputs.signals)
    )
    is_rejected = inputs.rollout.rejected == revision
    admission = admit(revision, observed, inputs.slot, is_rejected=is_rejected)
    target = Target(admission.revision, count.replicas, deployment.rollout)
    trial = canary.judge_trial(
        deployment.rollout, inputs.rollout, inputs.canary_totals, inputs.memory.baseline
    )
    capacity = plan_capacity(
        target,
        observed.groups(in_flight),
        inputs.rollout,
        verdict=trial.verdict,
        now=inputs.epoch_now,
    )
    prefill_count = _count_prefill(inputs, answering=count.replicas)
    prefill = _step_of_prefill(inputs, prefill_count, target, capacity.state)
    flips = _flips(inputs)
    adapters = decide_adapters(deployment, inputs.adapters)
    trials = _judge_adapters(inputs)
    traffic = Traffic(
        replicas=count.replicas,
        weights=capacity.weights,
        by_side=deployment.flips and is_labelled(observed),
        scaled_to_zero=deployment.is_woken_by_requests(count.replicas),
        adapters=tuple(trials.routed(one.adapter) for one in adapters.taken),
    )
    desired = desired_objects(deployment, inputs.settings, traffic, revision=revision)
    replicas = observed.replicas(in_flight)
    plan = plan_changes(
        adopt.kept(desired, observed),
        observed,
        capacity,
        owner_uid=inputs.owner_uid,
        owner_name=deployment.name,
        revision=revision,
        replicas=replicas,
        prefill=prefill,
        flips=flips,
        settled=inputs.settled,
        waiting_for=admission.waiting_for,
        isolates_groups=inputs.settings.network_policy,
    )
    snapshot = ReconcileSnapshot(
        inputs.accepted, revision, target, observed, replicas, capacity, prefill, plan,
        count.scaling, prefill_count, flips.last, adapters, trials,
    )  # fmt: skip
    prefill_scale = prefill_count.history if prefill_count is not None else ScaleHistory()
    memory = DecisionMemory(
        count.history, prefill_scale, flips.histories, trial.baseline, trials.baselines
    )
    return ReconcileDecision(snapshot, memory, admission.holds_slot)


def _count_prefill(inputs: DecisionInputs, *, answering: int) -> ReplicaCount | None:
    last, history = inputs.prefill_scaling, inputs.memory.prefill_scale
    of_prefill = _scale_inputs(inputs, last, history, inputs.prefill_signals)
    return wanted_prefill(inputs.deployment, answering, of_prefill)


def _scale_inputs(
    inputs: DecisionInputs, last: Scaling | None, history: ScaleHistory, signals: LoadSignals
) -> ScaleInputs:
    return ScaleInputs(
        last, history, signals, inputs.now, inputs.now_text, is_decided=inputs.has_scaled
    )


def _judge_adapters(inputs: DecisionInputs) -> TrialDecision:
    return decide_trials(
        inputs.deployment.adapters,
        trials_from_status(inputs.status),
        inputs.memory.trials,
        inputs.adapter_totals,
        inputs.loaded_adapters,
        now=inputs.epoch_now,
    )


def _flips(inputs: DecisionInputs) -> FlipDecision:
    prefill = inputs.deployment.prefill
    return plan_flips(
        None if prefill is None else prefill.flip,
        inputs.observed,
        inputs.flip_signals,
        inputs.last_flip,
        inputs.memory.sides,
        now=inputs.now,
        now_text=inputs.now_text,
        is_decided=inputs.has_scaled,
    )


def _step_of_prefill(
    inputs: DecisionInputs, count: ReplicaCount | None, answering: Target, state: CanaryState
) -> SideStep:
    """`answering` and `state`: the pods that answer and their rollout, after its step."""
    side, in_flight = inputs.observed.prefill, inputs.in_flight
    wanted = None if count is None else count.replicas
    step = plan_prefill(wanted, answering, side.groups(in_flight), state)
    return SideStep(step, side, side.replicas(in_flight))
