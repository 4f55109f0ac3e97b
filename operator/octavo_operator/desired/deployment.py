"""The Deployment of one revision. While its pods run, its template never changes.

See decide/adopt.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, REVISION_LABEL
from octavo_operator.desired.metadata import child
from octavo_operator.desired.pod import pod_template
from octavo_operator.desired.revision import revision_of
from octavo_operator.objects import labels, names

if TYPE_CHECKING:
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment

REVISION_HASH_ANNOTATION = "octavo.dev/asked"  # the hash, where the revision has another name
TEMPLATE_ANNOTATION = "octavo.dev/template"  # a hash of the template as it was applied


def engine_deployment(
    deployment: LLMDeployment,
    settings: OperatorSettings,
    revision: str,
    *,
    replicas: int | None,
    is_prefill: bool = False,
) -> dict[str, Any]:
    """Without `replicas` if an autoscaler sets it. `is_prefill`: of its prefill pods."""
    side = deployment.prefill_side() if is_prefill else deployment
    name = names.engine_deployment(deployment.name, revision, is_prefill=is_prefill)
    template = pod_template(side, settings, revision)
    spec: dict[str, Any] = {
        "progressDeadlineSeconds": max(60, round(deployment.rollout.progress_deadline_s)),
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": labels.revision(deployment.name, revision, side.component)},
        # Pods are replaced by moving replicas between Deployments; within one, at most what the
        # cluster itself takes away.
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": template,
    }
    if replicas is not None:
        spec["replicas"] = replicas
    text = json.dumps(template, sort_keys=True)
    annotations = {TEMPLATE_ANNOTATION: names.short_hash(text.encode(), 10)}
    if (fingerprint := revision_of(deployment, settings)) != revision:
        annotations[REVISION_HASH_ANNOTATION] = fingerprint
    head = child(
        deployment,
        "apps/v1",
        "Deployment",
        name,
        extra_labels={COMPONENT_LABEL: side.component, REVISION_LABEL: revision},
        annotations=annotations,
    )
    return {**head, "spec": spec}
