"""A whole operator, in this process, against a real API server; and the controllers it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from octavo_operator.cluster.kube import KubeCluster
from octavo_operator.cluster.kube_config import load
from octavo_operator.cluster.leader import LeaseTimes
from octavo_operator.objects import kinds
from octavo_operator.process import Operator, RunSettings
from octavo_operator.settings import OperatorSettings
from octavo_operator.watch.work_queue import Pace
from tests.fakes.apiserver import ApiError
from tests.fakes.deployments import with_images
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from octavo_operator.cluster.kube_config import KubeConfig
    from tests.fakes.apiserver import ApiServer

GATE = "octavo.dev/Routable"


@contextlib.asynccontextmanager
async def operator(
    server: ApiServer,
    namespace: str,
    *,
    identity: str = "one",
    config: KubeConfig | None = None,
    **run: Any,
) -> AsyncIterator[Operator]:
    """Through `config`, where a proxy stands before the API server."""
    config = config or load({}, str(server.kubeconfig))
    settings = with_images(OperatorSettings(namespaces=(namespace,)))
    run = {"pace": Pace(first_retry_s=0.1), "lease": LeaseTimes(4.0, 0.5, 1.0), **run}
    run_settings = RunSettings(
        namespace=namespace, identity=identity, host="127.0.0.1", port=0, **run
    )
    async with KubeCluster(config, field_manager="octavo-operator") as cluster:
        found = Operator(config, cluster, settings, run_settings)
        task = asyncio.create_task(found.run())
        try:
            await until(lambda: found._health().is_synced and found._may_write())
            yield found
        finally:
            found.stop()
            async with asyncio.timeout(15):
                await task


async def until(fact: Callable[[], Any], *, within_s: float = 60.0, every_s: float = 0.05) -> Any:
    """The first true answer of `fact`."""
    deadline = time.monotonic() + within_s
    while True:
        value = None
        with contextlib.suppress(ApiError, KeyError):
            value = await asyncio.to_thread(fact)
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{fact} within {within_s} s")
        await asyncio.sleep(every_s)


def conditions(server: ApiServer, namespace: str) -> dict[str, tuple[str, str]]:
    body = server.get(make_deployment(namespace=namespace))
    return {c["type"]: (c["status"], c["reason"]) for c in body["status"]["conditions"]}


def engines(server: ApiServer, namespace: str) -> list[kinds.Object]:
    return server.list("apps/v1", "Deployment", namespace)


def live(server: ApiServer, namespace: str) -> None:
    """As controllers and kubelets do: as many pods as requested, ready once their gate is open."""
    pods = server.list("v1", "Pod", namespace)
    for deployment in engines(server, namespace):
        _start_pods(server, namespace, deployment, {kinds.name_of(pod) for pod in pods})
    for listed in pods:
        _finish(server, {"apiVersion": "v1", "kind": "Pod", **listed})


def _start_pods(
    server: ApiServer, namespace: str, deployment: kinds.Object, there: set[str]
) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    name = kinds.name_of(deployment)
    wanted = {f"{name}-{n}" for n in range(deployment["spec"]["replicas"])}
    for gone in {pod for pod in there if pod.startswith(name)} - wanted:
        path = f"/api/v1/namespaces/{namespace}/pods/{gone}"
        server.request("DELETE", path, gracePeriodSeconds="0")
    for new in wanted - there:
        gates = [{"conditionType": GATE}]
        spec = {"readinessGates": gates, "containers": [{"name": "engine", "image": "i"}]}
        meta = {"namespace": namespace, "name": new, "labels": labels}
        pod = server.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        ready = [{"type": "ContainersReady", "status": "True"}]
        server.patch(pod, {"status": {"conditions": ready}}, subresource="status")


def _finish(server: ApiServer, pod: kinds.Object) -> None:
    """What the kubelet does when the gate is open."""
    conditions = pod["status"].get("conditions") or []
    found = {c["type"]: c["status"] for c in conditions}
    if found.get(GATE) == "True" and found.get("Ready") != "True":
        more = [*conditions, {"type": "Ready", "status": "True"}]
        with contextlib.suppress(ApiError):  # it has just been taken away
            server.patch(pod, {"status": {"conditions": more}}, subresource="status")
