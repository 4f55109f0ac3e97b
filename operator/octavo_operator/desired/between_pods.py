"""What pods of one LLMDeployment need for each other: an address, and a secret that they share."""

from __future__ import annotations

from typing import Any

from octavo_engine.protocol.kubernetes import POD_IP_ENV
from octavo_operator.spec.shared_secret import SECRET_KEY


def own_address() -> dict[str, Any]:
    """A variable, filled in by the kubelet."""
    return {"name": POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def secret_volume(name: str, secret: str) -> dict[str, Any]:
    source = {
        "secretName": secret,
        "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],  # a pod without it says so
        "defaultMode": 0o440,
    }
    return {"name": name, "secret": source}


def secret_mount(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": path, "readOnly": True}
