"""The head of every child: name, labels, and the owner whose deletion takes it along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import KIND
from octavo_operator.objects import labels
from octavo_operator.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_operator.spec import LLMDeployment


def child(
    deployment: LLMDeployment,
    api_version: str,
    kind: str,
    name: str,
    *,
    extra_labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """An object of the LLMDeployment without its body."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": deployment.namespace,
        "labels": {**labels.common(deployment.name), **(extra_labels or {})},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": deployment.name,
                "uid": deployment.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
