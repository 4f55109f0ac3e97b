"""The keys by which an engine encrypts what it keeps on disk: a Secret in its pod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.desired.between_pods import secret_mount, secret_volume
from octavo_operator.spec.shared_secret import SECRET_KEY

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment

_VOLUME = "encryption"
_MOUNT = "/run/octavo/encryption"


def arguments(deployment: LLMDeployment) -> list[str]:
    if not deployment.engine.encryption_secret:
        return []
    return [f"--encryption-key-file={_MOUNT}/{SECRET_KEY}"]


def volumes(deployment: LLMDeployment) -> list[dict[str, Any]]:
    secret = deployment.engine.encryption_secret
    return [secret_volume(_VOLUME, secret)] if secret else []


def mounts(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [secret_mount(_VOLUME, _MOUNT)] if deployment.engine.encryption_secret else []
