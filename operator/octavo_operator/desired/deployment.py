"""The Deployment of one revision. Its template never changes: another template is another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import REVISION_LABEL
from octavo_operator import labels, names
from octavo_operator.desired.metadata import child
from octavo_operator.desired.pod import pod_template

if TYPE_CHECKING:
    from octavo_operator.settings import Settings
    from octavo_operator.spec import LLMDeployment


def engine_deployment(
    deployment: LLMDeployment, settings: Settings, revision: str, *, replicas: int | None
) -> dict[str, Any]:
    """Without `replicas` where somebody else decides on it."""
    name = names.engine_deployment(deployment.name, revision)
    spec: dict[str, Any] = {
        "progressDeadlineSeconds": max(60, round(deployment.rollout.progress_deadline_s)),
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": labels.revision(deployment.name, revision)},
        # Pods are replaced by moving replicas between Deployments; within one, at most what the
        # cluster itself takes away.
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": pod_template(deployment, settings, revision),
    }
    if replicas is not None:
        spec["replicas"] = replicas
    head = child(deployment, "apps/v1", "Deployment", name, extra_labels={REVISION_LABEL: revision})
    return {**head, "spec": spec}
