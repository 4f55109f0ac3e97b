"""What lets prefill pods give KV blocks to the pods that answer: a flag, an address, a secret."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import KV_PORT
from octavo_engine.protocol.kubernetes import POD_IP_ENV
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
    config: dict[str, Any] = {"kv_connector": "OctavoConnector", "kv_role": "kv_consumer"}
    if deployment.is_prefill:
        config |= {"kv_role": "kv_producer", "kv_ip": f"$({POD_IP_ENV})", "kv_port": KV_PORT}
    config["kv_connector_extra_config"] = {"secret_file": f"{_MOUNT}/{SECRET_KEY}"}
    return [f"--kv-transfer-config={json.dumps(config)}"]


def variables(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [own_address()] if deployment.is_prefill else []


def ports(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [{"name": PORT_NAME, "containerPort": KV_PORT}] if deployment.is_prefill else []


def volumes(deployment: LLMDeployment) -> list[dict[str, Any]]:
    if deployment.prefill is None:
        return []
    return [secret_volume(_VOLUME, deployment.prefill.secret)]


def mounts(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [] if deployment.prefill is None else [secret_mount(_VOLUME, _MOUNT)]
