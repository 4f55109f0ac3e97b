"""The folder of a pod in which KV blocks stay on disk: on the node, or in a claim of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.desired.engine_options import KV_DISK_MOUNT
from octavo_operator.objects.quantities import parse_quantity, whole

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment

VOLUME = "kv"
# Beside the blocks: files that are being written, and those that a killed engine left behind. A pod
# whose folder outgrows its limit is evicted.
SLACK_BYTES = 1 << 30


def volumes(deployment: LLMDeployment) -> list[dict[str, Any]]:
    tiers = deployment.engine.kv_tiers
    if tiers.disk_size is None:
        return []
    if tiers.disk_claim:
        claim = {"claimName": tiers.disk_claim}
        return [{"name": VOLUME, "persistentVolumeClaim": claim}]
    return [{"name": VOLUME, "emptyDir": {"sizeLimit": str(node_bytes(deployment))}}]


def mounts(deployment: LLMDeployment) -> list[dict[str, Any]]:
    if deployment.engine.kv_tiers.disk_size is None:
        return []
    return [{"name": VOLUME, "mountPath": KV_DISK_MOUNT}]


def node_bytes(deployment: LLMDeployment) -> int:
    """What the folder may take of the node's own disk."""
    tiers = deployment.engine.kv_tiers
    if tiers.disk_size is None or tiers.disk_claim:
        return 0
    return whole(parse_quantity(tiers.disk_size)) + SLACK_BYTES
