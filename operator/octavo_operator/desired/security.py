"""What lets engine pods run in a namespace that enforces the `restricted` pod security standard."""

from __future__ import annotations

from typing import Any


def pod_security(user: int | None) -> dict[str, Any]:
    """`user` is also its group; None: the cluster assigns one."""
    ids = {} if user is None else {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {
        "runAsNonRoot": True,
        **ids,
        "fsGroupChangePolicy": "OnRootMismatch",  # a large cache is not walked at each start
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
    }
