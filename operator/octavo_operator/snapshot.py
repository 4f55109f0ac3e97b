"""What one look at an LLMDeployment has come to: how it should be, how it is, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.plan import CapacityPlan, Plan, Wish
    from octavo_operator.decide.rollout import Replica
    from octavo_operator.report.status import Scaling
    from octavo_operator.spec import LLMDeployment
    from octavo_operator.watch.world import Observed


@dataclass(frozen=True, slots=True)
class View:
    """Everything one look has computed."""

    accepted: Accepted
    revision: str
    wish: Wish
    observed: Observed
    replicas: list[Replica]
    capacity: CapacityPlan
    plan: Plan
    scaling: Scaling | None

    @property
    def deployment(self) -> LLMDeployment:
        """By the spec that is carried out."""
        return self.accepted.deployment

    @property
    def is_queued(self) -> bool:
        """Its rollout waits until those of others have ended."""
        return self.wish.revision != self.revision
