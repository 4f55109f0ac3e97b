"""The Kubernetes source against a real API server, with no more rights than the router is given."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.discovery.kubernetes.account import at_url
from octavo_router.discovery.kubernetes.source import KubernetesSource
from octavo_router.discovery.kubernetes.watch import WatchSettings
from octavo_router.metrics import DiscoveryCounts
from tests.apiserver import build
from tests.fakes.facts import run, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from octavo_router.discovery.source import Found
    from octavo_router.endpoints.endpoint import EndpointSpec
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster

RBAC = "rbac.authorization.k8s.io"
OF_M = {"octavo.dev/deployment": "m"}
ENGINE = {**OF_M, "app.kubernetes.io/component": "engine"}


@pytest.fixture(scope="module")
def apiserver() -> Iterator[ApiServer]:
    if reason := build.why_not():
        pytest.skip(reason)
    from tests.fakes.apiserver import ApiServer

    with ApiServer.start() as server:
        yield server


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """One in which the user may read what a router reads, and nothing else."""
    name = apiserver.make_namespace()
    rules = [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ]
    meta = {"name": "router", "namespace": name}
    apiserver.create({"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": meta, "rules": rules})
    apiserver.create(
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": "router"},
            "subjects": [{"apiGroup": RBAC, "kind": "User", "name": apiserver.user}],
        }
    )
    return name


class Router:
    """What the source told."""

    def __init__(self) -> None:
        self.history: list[Found] = []
        self.counts = DiscoveryCounts()

    @property
    def specs(self) -> dict[str, EndpointSpec]:
        found = self.history[-1].specs if self.history else ()
        return {dict(spec.labels)["pod"]: spec for spec in found}


@asynccontextmanager
async def watching(
    apiserver: ApiServer, namespace: str, folder: Path, settings: WatchSettings | None = None
) -> AsyncIterator[Router]:
    token = folder / "token"
    token.write_text(apiserver.user_token)
    account = at_url(
        apiserver.url, token_file=str(token), ca_file=str(apiserver.ca_file), namespace=namespace
    )
    router = Router()
    source = KubernetesSource(account, counts=router.counts, settings=settings)
    task = asyncio.create_task(source.run(router.history.append))
    try:
        yield router
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def pod(namespace: str, name: str) -> dict[str, Any]:
    """Bound to a node that is not there, so that a deletion waits for it."""
    spec = {"nodeName": "nowhere", "containers": [{"name": "engine", "image": "octavo"}]}
    meta = {"name": name, "namespace": namespace, "labels": ENGINE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def running(ip: str, *, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "ContainersReady", "status": "True" if ready else "False"}]
    ips = {"podIP": ip, "podIPs": [{"ip": ip}]}
    return {"status": {"phase": "Running", **ips, "conditions": conditions}}


def service(namespace: str, name: str, routing: dict[str, Any], **labels: str) -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": namespace,
        "labels": labels,
        "annotations": {"octavo.dev/routing": json.dumps(routing)},
    }
    spec = {"clusterIP": "None", "ports": [{"name": "http", "port": 8000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def test_the_life_of_a_pod(apiserver, namespace, tmp_path):
    async def story() -> None:
        apiserver.create(
            service(
                namespace, "m", {"names": ["m"], "port": 8001}, **{"octavo.dev/deployment": "m"}
            )
        )
        one = pod(namespace, "one")
        async with watching(apiserver, namespace, tmp_path) as router:
            await until(lambda: bool(router.history))
            assert [route.names for route in router.history[-1].pools] == [("m",)]
            created = apiserver.create(one)
            apiserver.patch(one, running("10.9.0.1", ready=False), subresource="status")
            await until(lambda: "one" in router.specs)
            spec = router.specs["one"]
            assert (spec.id, spec.pool) == (created["metadata"]["uid"], f"{namespace}/m")
            assert spec.address.url == "http://10.9.0.1:8001"
            assert not spec.is_ready
            apiserver.patch(one, running("10.9.0.1"), subresource="status")
            await until(lambda: router.specs["one"].is_ready)
            apiserver.delete(one)  # it has a grace period, and nobody confirms
            await until(lambda: router.specs["one"].is_terminating)
            apiserver.request("DELETE", apiserver.path_of(one), gracePeriodSeconds="0")
            await until(lambda: router.specs == {})
            assert router.counts.errors == 0

    run(story())


def test_a_plain_service_and_its_slices(apiserver, namespace, tmp_path):
    async def story() -> None:
        apiserver.create(service(namespace, "vllm", {"names": ["llama"]}))
        ref = {"kind": "Pod", "name": "v-0", "namespace": namespace, "uid": "uid-v-0"}
        apiserver.create(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "vllm-x",
                    "namespace": namespace,
                    "labels": {"kubernetes.io/service-name": "vllm"},
                },
                "addressType": "IPv4",
                "endpoints": [
                    {"addresses": ["10.9.1.1"], "conditions": {"ready": True}, "targetRef": ref}
                ],
                "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
            }
        )
        async with watching(apiserver, namespace, tmp_path) as router:
            await until(lambda: "v-0" in router.specs)
            assert router.specs["v-0"].id == "uid-v-0"
            assert router.specs["v-0"].address.url == "http://10.9.1.1:8000"

    run(story())


def test_watches_end_and_go_on_without_a_new_list(apiserver, namespace, tmp_path):
    """The API server ends a watch after the second that it was asked to last."""

    async def story() -> None:
        settings = WatchSettings(watch_s=1.0)
        async with watching(apiserver, namespace, tmp_path, settings) as router:
            await until(lambda: bool(router.history))
            heard_at = router.counts.heard_at
            assert heard_at is not None
            await until(lambda: (router.counts.heard_at or 0.0) > heard_at + 0.5)
            one = pod(namespace, "one")
            apiserver.create(one)
            apiserver.patch(one, running("10.9.0.1"), subresource="status")
            await until(lambda: "one" in router.specs)
            assert (router.counts.relists, router.counts.errors) == (0, 0)

    run(story())


def test_without_rights_it_says_so_and_tells_nothing(apiserver, tmp_path, caplog):
    async def story() -> None:
        elsewhere = apiserver.make_namespace()
        async with watching(apiserver, elsewhere, tmp_path) as router:
            await until(lambda: router.counts.errors >= 2)
            assert router.history == []
        assert "see its Role" in caplog.text or any(
            "see its Role" in str(getattr(record, "reason", "")) for record in caplog.records
        )

    run(story())
