"""A thousand LLMDeployments: how long a start takes, what idling costs, how large it grows.

    python -m benchmarks.operator.scale [COUNT]

Not a test: figures of a shared machine are no verdict. It starts a real API server, lets one
operator make all children, plays the kubelet, then starts `octavo operator` anew and watches it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from octavo_operator.cluster.kube import KubeCluster
from octavo_operator.cluster.kube_config import load
from octavo_operator.process import Operator, RunSettings
from tests.fakes.apiserver import ApiServer
from tests.fakes.deployments import CPU_IMAGE, with_images
from tests.fakes.operator import make_deployment

IDLE_S = 30.0


def main(count: int) -> None:
    with ApiServer.start() as server:
        server.install()
        namespace = server.make_namespace()
        _each(range(count), lambda n: server.create(_deployment(namespace, n)))
        asyncio.run(_make_children(server, namespace, count))
        deployments = server.list("apps/v1", "Deployment", namespace)
        _each(deployments, lambda body: _start_pod(server, namespace, body))
        asyncio.run(_settle(server, namespace, count))
        _measure(server, count)


def _deployment(namespace: str, number: int) -> dict[str, Any]:
    name = f"m{number:04d}"
    model = {"uri": "demo://smollm2", "servedName": name}
    return make_deployment(name, namespace, model=model)


async def _make_children(server: ApiServer, namespace: str, count: int) -> None:
    def is_made() -> bool:
        return len(server.list("apps/v1", "Deployment", namespace)) >= count

    await _operate(server, is_made)


async def _settle(server: ApiServer, namespace: str, count: int) -> None:
    def is_settled() -> bool:
        _finish_pods(server, namespace)
        bodies = server.list("octavo.dev/v1alpha1", "LLMDeployment", namespace)
        return all((b.get("status") or {}).get("routableReplicas") == 1 for b in bodies)

    await _operate(server, is_settled)


async def _operate(server: ApiServer, is_done: Any) -> None:
    config = load({}, str(server.kubeconfig))
    run = RunSettings(
        namespace="default", identity="setup", host="127.0.0.1", port=0, writes_per_s=1000.0,
        num_workers=16, lease=None,
    )  # fmt: skip
    began_at = time.monotonic()
    async with KubeCluster(config, field_manager="octavo-operator") as cluster:
        operator = Operator(config, cluster, with_images(), run)
        task = asyncio.create_task(operator.run())
        while not await asyncio.to_thread(is_done):  # noqa: ASYNC110  # asks another process
            await asyncio.sleep(1.0)
        operator.stop()
        await task
    _say(f"prepared in {time.monotonic() - began_at:.0f} s")


def _start_pod(server: ApiServer, namespace: str, deployment: dict[str, Any]) -> None:
    template = deployment["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": namespace,
            "name": deployment["metadata"]["name"],
            **{key: template["metadata"].get(key, {}) for key in ("labels", "annotations")},
        },
        "spec": {key: v for key, v in template["spec"].items() if key != "serviceAccountName"},
    }
    stored = server.create(pod)
    ready = [{"type": "ContainersReady", "status": "True"}]
    server.patch(stored, {"status": {"conditions": ready}}, subresource="status")


def _finish_pods(server: ApiServer, namespace: str) -> None:
    for listed in server.list("v1", "Pod", namespace):
        found = {c["type"]: c["status"] for c in listed["status"]["conditions"]}
        if found.get("octavo.dev/Routable") == "True" and "Ready" not in found:
            more = [*listed["status"]["conditions"], {"type": "Ready", "status": "True"}]
            pod = {"apiVersion": "v1", "kind": "Pod", **listed}
            server.patch(pod, {"status": {"conditions": more}}, subresource="status")


def _measure(server: ApiServer, count: int) -> None:
    port = "18090"
    command = [
        sys.executable, "-m", "octavo.cli", "operator", f"--kubeconfig={server.kubeconfig}",
        f"--port={port}", "--host=127.0.0.1", "--log-level=warning", f"--cpu-image={CPU_IMAGE}",
    ]  # fmt: skip
    began_at = time.monotonic()
    process = subprocess.Popen(command, env=os.environ)
    try:
        watched = psutil.Process(process.pid)
        while _metric(port, 'octavo_operator_reconciles_total{outcome="done"}') < count:
            time.sleep(0.2)
        cpu = watched.cpu_times()
        _say(f"start-up: {time.monotonic() - began_at:.1f} s, {cpu.user + cpu.system:.1f} s of CPU")
        time.sleep(20)  # the watches list too, at their own pace
        before = watched.cpu_times()
        time.sleep(IDLE_S)
        after = watched.cpu_times()
        used = after.user + after.system - before.user - before.system
        _say(f"idle: {100 * used / IDLE_S:.1f} % of a core")
        _say(f"memory: {watched.memory_info().rss / 2**20:.0f} MiB resident")
        _say(f"writes: {_writes(port)}")
    finally:
        process.terminate()
        began_at = time.monotonic()
        process.wait(timeout=20)
        _say(f"ended in {time.monotonic() - began_at:.1f} s with {process.returncode}")


def _scrape(port: str) -> list[str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return list(answer.read().decode().splitlines())
    except OSError:
        return []


def _metric(port: str, name: str) -> float:
    return next((float(x.rpartition(" ")[2]) for x in _scrape(port) if x.startswith(name)), 0.0)


def _writes(port: str) -> list[str]:
    lines = [line for line in _scrape(port) if line.startswith("octavo_operator_api_calls_total")]
    return [line for line in lines if 'verb="get"' not in line and 'verb="list"' not in line]


def _each(items: Any, action: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(action, items))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
