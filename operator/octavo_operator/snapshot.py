"""What one look at an LLMDeployment has come to: how it should be, how it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.plan import CapacityPlan, ReconcilePlan, Target
    from octavo_operator.decide.rollout import RevisionReplica
    from octavo_operator.report.status import Scaling
    from octavo_operator.spec import LLMDeployment
    from octavo_operator.watch.world import Observed


@dataclass(frozen=True, slots=True)
class ReconcileSnapshot:
    """Everything one look has computed."""

    accepted: Accepted
    revision: str
    wish: Target
    observed: Observed
    replicas: list[RevisionReplica]
    capacity: CapacityPlan
    plan: ReconcilePlan
    scaling: Scaling | None

    @property
    def deployment(self) -> LLMDeployment:
        """By the spec that is carried out."""
        return self.accepted.deployment

    @property
    def is_queued(self) -> bool:
        """Its rollout waits until those of others have ended."""
        return self.wish.revision != self.revision
