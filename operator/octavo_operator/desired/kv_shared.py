"""The store of KV blocks that pods share: a claim of the user's, or a bucket with its Secret."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.desired.engine_options import KV_SHARED_MOUNT

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment

_VOLUME = "kv-shared"
_KEYS_VOLUME = "kv-shared-keys"
_KEYS_MOUNT = "/run/octavo/kv-shared"


def volumes(deployment: LLMDeployment) -> list[dict[str, Any]]:
    tiers = deployment.engine.kv_tiers
    found: list[dict[str, Any]] = []
    if tiers.shared_claim:
        claim = {"claimName": tiers.shared_claim}
        found.append({"name": _VOLUME, "persistentVolumeClaim": claim})
    if tiers.shared_secret:
        secret = {"secretName": tiers.shared_secret, "defaultMode": 0o440}
        found.append({"name": _KEYS_VOLUME, "secret": secret})
    return found


def mounts(deployment: LLMDeployment) -> list[dict[str, Any]]:
    tiers = deployment.engine.kv_tiers
    found: list[dict[str, Any]] = []
    if tiers.shared_claim:
        found.append({"name": _VOLUME, "mountPath": KV_SHARED_MOUNT})
    if tiers.shared_secret:
        found.append({"name": _KEYS_VOLUME, "mountPath": _KEYS_MOUNT, "readOnly": True})
    return found


def variables(deployment: LLMDeployment) -> list[dict[str, Any]]:
    """Where the engine finds the keys: octavo_common.remote.credentials."""
    if not deployment.engine.kv_tiers.shared_secret:
        return []
    return [{"name": "OCTAVO_CREDENTIALS", "value": _KEYS_MOUNT}]
