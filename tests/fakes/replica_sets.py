"""Pods in a test of decisions: [revision, whether it serves]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Pod: TypeAlias = list[Any]  # changed in place


def resized(pods: list[Pod], targets: Mapping[str, int]) -> list[Pod]:
    """As ReplicaSets would have them: new pods do not serve, and those go first that do not."""
    for revision, target in targets.items():
        own = [pod for pod in pods if pod[0] == revision]
        pods = pods + [[revision, False] for _ in range(target - len(own))]
        for pod in sorted(own, key=lambda pod: bool(pod[1]))[: max(0, len(own) - target)]:
            pods = [other for other in pods if other is not pod]
    return pods
