"""The PodDisruptionBudget: how many engines a node drain may take at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.desired.metadata import child
from octavo_operator.objects import labels, names

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment


def disruption_budget(deployment: LLMDeployment) -> dict[str, Any]:
    name = names.disruption_budget(deployment.name)
    allowed = deployment.rollout.max_unavailable
    spec = {
        # At least one: a budget of none would stop every node from being drained for ever.
        "maxUnavailable": 1 if allowed in (0, "0%") else allowed,
        "selector": {"matchLabels": labels.pods(deployment.name)},
        # A pod that never became ready needs no protection.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return {**child(deployment, "policy/v1", "PodDisruptionBudget", name), "spec": spec}
