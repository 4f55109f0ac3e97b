"""The PersistentVolumeClaim in which fetched weights outlive their pod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.desired.metadata import child
from octavo_operator.objects import names

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment


def volume_claim(deployment: LLMDeployment) -> dict[str, Any]:
    cache = deployment.cache
    spec: dict[str, Any] = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    name = names.cache_claim(deployment.name)
    return {**child(deployment, "v1", "PersistentVolumeClaim", name), "spec": spec}
