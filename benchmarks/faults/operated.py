"""What an operator has to do in a soak: a real API server, and LLMDeployments that change all day.

The API server has no controllers: `turn` plays those of Deployments and the kubelet's part, changes
an LLMDeployment now and then (replicas, a rollout, its suspension, a pod that is gone), and reads
whether the operator has acted on it. In between the API server itself is killed and comes back.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx

from benchmarks.servers import Server, free_port
from tests.apiserver import build
from tests.fakes.apiserver import ADAPTER_CRD_FILE, CRD_FILE, ApiError, ApiServer
from tests.fakes.deployments import CPU_IMAGE
from tests.fakes.live_operator import engines, live
from tests.fakes.operator import make_deployment
from tests.fakes.operator_story import is_settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEPLOYMENTS: Final = 4
CHANGE_EVERY_S: Final = 15.0
AWAY_EVERY_S: Final = 600.0  # the API server
SETTLED_WITHIN_S: Final = 120.0


@dataclass(slots=True)
class OperatedCluster:
    """`turn` and `settle` block, so call them in a thread; `replace_api_server` in the main one."""

    api: ApiServer
    namespace: str
    operator: Server
    changes: int = 0
    _change_at: float = field(default_factory=time.monotonic)
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def deployments(self) -> list[dict[str, Any]]:
        names = [f"model-{number}" for number in range(DEPLOYMENTS)]
        return [make_deployment(name, self.namespace, replicas=2) for name in names]

    def turn(self) -> None:
        """A look at everything, and a change where one is due."""
        with suppress(ApiError, httpx.HTTPError, KeyError):  # it is away, or all is just changing
            self._play_controllers()
            if time.monotonic() >= self._change_at:
                self._change_at = time.monotonic() + CHANGE_EVERY_S
                self._change(self._rng.choice(self.deployments))
                self.changes += 1

    def settle(self) -> int:
        """How many LLMDeployments do not come to rest, once nothing changes any more."""
        for deployment in self.deployments:
            self.api.patch(deployment, {"spec": {"suspend": False, "replicas": 2}})
        ends_at = time.monotonic() + SETTLED_WITHIN_S
        left = DEPLOYMENTS
        while left and time.monotonic() < ends_at:
            with suppress(ApiError, httpx.HTTPError, KeyError):
                self._play_controllers()
                left = sum(not is_settled(self.api.get(one)) for one in self.deployments)
            time.sleep(0.5)
        return left

    def replace_api_server(self) -> None:
        """It is killed, and another one comes with what that had stored."""
        self.api.kill()
        self.api.start_again()

    def _play_controllers(self) -> None:
        live(self.api, self.namespace)
        names = tuple(f"{one['metadata']['name']}-" for one in engines(self.api, self.namespace))
        for pod in self.api.list("v1", "Pod", self.namespace):
            if not pod["metadata"]["name"].startswith(names):  # its Deployment was deleted
                self._delete_pod(pod)

    def _change(self, deployment: dict[str, Any]) -> None:
        kind = self._rng.choice(("replicas", "rollout", "suspend", "pod"))
        if kind == "pod":
            pods = self.api.list("v1", "Pod", self.namespace)
            if pods:
                self._delete_pod(self._rng.choice(pods))
            return
        specs: dict[str, dict[str, Any]] = {
            "replicas": {"replicas": self._rng.randint(1, 3), "suspend": False},
            "rollout": {"engine": {"maxNumSeqs": self._rng.randint(2, 9)}, "suspend": False},
            "suspend": {"suspend": True},
        }
        self.api.patch(deployment, {"spec": specs[kind]})

    def _delete_pod(self, pod: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
        self.api.request("DELETE", path, gracePeriodSeconds="0")


@contextmanager
def operated(folder: Path) -> Iterator[OperatedCluster]:
    """Raises SystemExit where there can be no API server. Call it in the main thread."""
    if reason := build.why_not():
        raise SystemExit(f"The operator cannot be part of it: {reason}, or use --no-operator.")
    with ApiServer.start() as api:
        api.install(CRD_FILE)
        api.install(ADAPTER_CRD_FILE)
        namespace, port = api.make_namespace(), free_port()
        operator = Server.start(
            [sys.executable, "-m", "octavo.cli", "operator", "--kubeconfig", str(api.kubeconfig),
             "--namespaces", namespace, "--own-namespace", namespace, "--identity", "soak",
             "--host", "127.0.0.1", "--port", str(port), "--cpu-image", CPU_IMAGE],
            port=port, log=folder / "operator.log", ready="/readyz",
        )  # fmt: skip
        try:
            cluster = OperatedCluster(api, namespace, operator)
            for deployment in cluster.deployments:
                api.create(deployment)
            yield cluster
        finally:
            operator.stop()
