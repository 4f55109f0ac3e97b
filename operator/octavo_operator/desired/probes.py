"""When an engine counts as started, alive and ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.objects.quantities import parse_quantity

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment

PORT_NAME = "http"
_STARTUP_PERIOD_S = 2
# Weights fit into the memory limit; the slowest disk worth waiting for reads this much a second.
_SLOW_DISK_BYTES_PER_S = 50_000_000
_LEAST_STARTUP_S = 300
_MOST_STARTUP_S = 3 * 3600
_UNKNOWN_STARTUP_S = 1800  # no limit says how large the model may be


def probes(deployment: LLMDeployment, *, is_tls: bool = False) -> dict[str, Any]:
    budget_s = startup_budget_s(deployment)
    return {
        # Fetching is the init step's, so that a slow network never looks like a hung engine.
        "startupProbe": {
            **_get("/health", is_tls=is_tls),
            "periodSeconds": _STARTUP_PERIOD_S,
            "timeoutSeconds": 2,
            "failureThreshold": max(1, round(budget_s / _STARTUP_PERIOD_S)),
        },
        "livenessProbe": {
            **_get("/health", is_tls=is_tls), "periodSeconds": 10, "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "readinessProbe": {
            **_get("/ready", is_tls=is_tls), "periodSeconds": 2, "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
    }  # fmt: skip


def startup_budget_s(deployment: LLMDeployment) -> float:
    """How long loading may take. From the spec alone: what is learnt later must not roll pods."""
    if deployment.engine.startup_timeout_s is not None:
        return deployment.engine.startup_timeout_s
    limit = deployment.resources.limits.get("memory")
    if limit is None:
        return _UNKNOWN_STARTUP_S
    seconds = float(parse_quantity(limit)) / _SLOW_DISK_BYTES_PER_S
    return min(max(seconds, _LEAST_STARTUP_S), _MOST_STARTUP_S)


def _get(path: str, *, is_tls: bool) -> dict[str, Any]:
    """The kubelet checks no certificate."""
    scheme = {"scheme": "HTTPS"} if is_tls else {}
    return {"httpGet": {"path": path, "port": PORT_NAME, **scheme}}
