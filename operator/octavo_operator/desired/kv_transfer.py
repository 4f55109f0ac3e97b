"""What lets prefill pods give KV blocks to the pods that answer: a flag, an address, a secret."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import KV_PORT
from octavo_engine.protocol.kubernetes import ANSWERS_SIDE, POD_IP_ENV, PROMPTS_SIDE, SIDE_LABEL
from octavo_operator.desired.between_pods import own_address, secret_mount, secret_volume
from octavo_operator.spec.shared_secret import SECRET_KEY

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment

PORT_NAME = "kv"
_VOLUME = "kv-secret"
_MOUNT = "/run/octavo/kv"


def arguments(deployment: LLMDeployment) -> list[str]:
    """Of `octavo serve`. A flag, not a line of its file: the kubelet fills in the address."""
    if deployment.prefill is None:
        return []
    role = "kv_producer" if deployment.is_prefill else "kv_consumer"
    config: dict[str, Any] = {
        "kv_connector": "OctavoConnector",
        "kv_role": "kv_both" if deployment.flips else role,
    }
    if _serves(deployment):
        config |= {"kv_ip": f"$({POD_IP_ENV})", "kv_port": KV_PORT}
    config["kv_connector_extra_config"] = {"secret_file": f"{_MOUNT}/{SECRET_KEY}"}
    return [f"--kv-transfer-config={json.dumps(config)}"]


def variables(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [own_address()] if _serves(deployment) else []


def ports(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [{"name": PORT_NAME, "containerPort": KV_PORT}] if _serves(deployment) else []


def side_labels(deployment: LLMDeployment) -> dict[str, str]:
    """On pods that change sides: where they begin."""
    if not deployment.flips:
        return {}
    return {SIDE_LABEL: PROMPTS_SIDE if deployment.is_prefill else ANSWERS_SIDE}


def volumes(deployment: LLMDeployment) -> list[dict[str, Any]]:
    if deployment.prefill is None:
        return []
    return [secret_volume(_VOLUME, deployment.prefill.secret)]


def mounts(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [] if deployment.prefill is None else [secret_mount(_VOLUME, _MOUNT)]


def _serves(deployment: LLMDeployment) -> bool:
    """Whether others fetch KV blocks there."""
    return deployment.is_prefill or deployment.flips
