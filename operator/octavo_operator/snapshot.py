"""One reconcile of an LLMDeployment as values: what is desired, what is observed, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.adapter_trials import TrialDecision
    from octavo_operator.decide.adapters import AdapterDecision
    from octavo_operator.decide.autoscale import ReplicaCount, Scaling
    from octavo_operator.decide.flip import LastFlip
    from octavo_operator.decide.observed import Observed
    from octavo_operator.decide.plan import CapacityPlan, ReconcilePlan, SideStep, Target
    from octavo_operator.decide.rollout import RevisionReplica
    from octavo_operator.spec import LLMDeployment


@dataclass(frozen=True, slots=True)
class ReconcileSnapshot:
    """Everything that one reconcile has computed."""

    accepted: Accepted
    revision: str
    target: Target
    observed: Observed
    replicas: list[RevisionReplica]
    capacity: CapacityPlan
    prefill: SideStep
    plan: ReconcilePlan
    scaling: Scaling | None
    prefill_count: ReplicaCount | None  # None: the spec has no prefill pods
    last_flip: LastFlip | None  # the last change of sides
    adapters: AdapterDecision
    trials: TrialDecision  # of adapters

    @property
    def deployment(self) -> LLMDeployment:
        """Of the spec that is carried out."""
        return self.accepted.deployment

    @property
    def is_done(self) -> bool:
        """Every replica of both sides has the current revision and serves."""
        return self.capacity.step.is_done and self.prefill.step.is_done

    @property
    def wanted_prefill(self) -> int | None:
        """None: the spec has no prefill pods."""
        return None if self.prefill_count is None else self.prefill_count.replicas

    @property
    def prefill_scaling(self) -> Scaling | None:
        """The autoscaler's decision about prefill pods, where it makes one."""
        return None if self.prefill_count is None else self.prefill_count.scaling

    @property
    def is_queued(self) -> bool:
        """Its rollout waits for those of other LLMDeployments."""
        return self.target.revision != self.revision
