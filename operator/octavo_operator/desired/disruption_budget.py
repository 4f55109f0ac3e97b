"""The PodDisruptionBudget: how many engines a node drain may take at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.desired.metadata import child
from octavo_operator.objects import labels, names
from octavo_operator.objects.quantities import parse_count

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment


def disruption_budget(deployment: LLMDeployment) -> dict[str, Any]:
    name = names.disruption_budget(deployment.name)
    spec = {
        "maxUnavailable": _allowed(deployment),
        "selector": {"matchLabels": labels.pods(deployment.name)},
        # A pod that never became ready needs no protection.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return {**child(deployment, "policy/v1", "PodDisruptionBudget", name), "spec": spec}


def _allowed(deployment: LLMDeployment) -> int | str:
    """At least one: a budget of none would stop every node from being drained for ever."""
    allowed = deployment.rollout.max_unavailable
    if deployment.group is not None and isinstance(allowed, str):
        # The budget counts pods, and each of them may be of another group: a share of the pods
        # could be all groups. One that is broken uses up its place by its leader, until that is
        # ready again.
        scaling = deployment.autoscaling
        groups = deployment.replicas if scaling is None else scaling.min_replicas
        allowed = parse_count(allowed, groups, round_up=False)
    return 1 if allowed in (0, "0%") else allowed
