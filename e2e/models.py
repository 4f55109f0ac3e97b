"""LLMDeployments for tests: their specs, and their state in the cluster."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from e2e.kubectl import Kubectl

# Many of them fit on a small node; what they may not have is memory without end.
SMALL = {"requests": {"cpu": "20m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
LARGE = {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
PACE = {"sim-step-base-ms": "20"}  # of simulated engines: 24 tokens take half a second
POLL_S = 0.2


def simulated(name: str, **spec: Any) -> dict[str, Any]:
    """Engines with the true API and scheduler over modelled time."""
    engine = {"device": "sim", "args": PACE, **spec.pop("engine", {})}
    return _body(name, "hf://Qwen/Qwen3-32B", engine, SMALL, spec)


def real(name: str, **spec: Any) -> dict[str, Any]:
    """Engines with the model that comes with their image."""
    return _body(name, "demo://smollm2", spec.pop("engine", {}), LARGE, spec)


def _body(
    name: str, uri: str, engine: dict[str, Any], resources: dict[str, Any], spec: dict[str, Any]
) -> dict[str, Any]:
    rollout = {"drainTimeout": "20s", **spec.pop("rollout", {})}
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": uri, "servedName": name},
            "engine": engine,
            "resources": resources,
            "rollout": rollout,
            **spec,
        },
    }


class Model:
    """One LLMDeployment in the cluster."""

    def __init__(self, kubectl: Kubectl, body: dict[str, Any]) -> None:
        self._kubectl = kubectl
        self.name: str = body["metadata"]["name"]
        kubectl.apply(body)

    def patch(self, **spec: Any) -> None:
        """Lays fields over the spec; None removes one."""
        words = ("llmdeployment", self.name, "--type=merge", "--patch", json.dumps({"spec": spec}))
        self._kubectl("patch", *words)

    def status(self) -> dict[str, Any]:
        """{} until it is about the spec as it is now."""
        body = self._kubectl.get("llmdeployment", self.name)
        status: dict[str, Any] = body.get("status", {})
        is_current = status.get("observedGeneration") == body["metadata"]["generation"]
        return status if is_current else {}

    def condition(self, kind: str) -> dict[str, Any]:
        for condition in self.status().get("conditions", []):
            if condition["type"] == kind:
                return dict(condition)
        return {"status": "Unknown", "reason": "", "message": ""}

    def pods(self) -> list[dict[str, Any]]:
        """Those that are not on their way out."""
        selector = f"--selector=octavo.dev/deployment={self.name}"
        found = json.loads(self._kubectl("get", "pods", selector, "--output=json"))["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def revisions(self) -> set[str]:
        return {pod["metadata"]["labels"]["octavo.dev/revision"] for pod in self.pods()}

    def await_settled(self, replicas: int = 1, timeout_s: float = 120.0) -> None:
        """Until all replicas are of the current revision, and routers send them requests."""

        def is_settled() -> bool:
            status = self.status()
            counts = ("replicas", "updatedReplicas", "routableReplicas")
            is_counted = all(status.get(count, 0) == replicas for count in counts)
            return is_counted and self.condition("Progressing")["reason"] == "Complete"

        self.until(is_settled, f"{replicas} replicas of the wanted revision", timeout_s)

    def until(self, is_so: Callable[[], bool], what: str, timeout_s: float) -> float:
        """Seconds until it was so. Raises AssertionError with the status."""
        began_at = time.monotonic()
        while not is_so():
            if time.monotonic() - began_at > timeout_s:
                status = json.dumps(self.status(), indent=1)
                raise AssertionError(f"{self.name}: no {what} after {timeout_s} s: {status}")
            time.sleep(POLL_S)
        return time.monotonic() - began_at
