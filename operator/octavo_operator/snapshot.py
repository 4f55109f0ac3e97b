"""One reconcile of an LLMDeployment as values: what is desired, what is observed, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.adapters import AdapterDecision
    from octavo_operator.decide.autoscale import Scaling
    from octavo_operator.decide.observed import Observed
    from octavo_operator.decide.plan import CapacityPlan, ReconcilePlan, Target
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
    plan: ReconcilePlan
    scaling: Scaling | None
    adapters: AdapterDecision

    @property
    def deployment(self) -> LLMDeployment:
        """Of the spec that is carried out."""
        return self.accepted.deployment

    @property
    def is_queued(self) -> bool:
        """Its rollout waits for those of other LLMDeployments."""
        return self.target.revision != self.revision
