"""The whole operator against a real API server: kopf's watches, the queue, the Lease, the port."""

from __future__ import annotations

import asyncio
import gc
import time
from functools import partial

import pytest

from octavo_operator.cluster.kube import KubeCluster
from octavo_operator.cluster.kube_config import KubeConfig, load
from octavo_operator.cluster.leader import LeaseTimes
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.errors import ApiRefused
from octavo_operator.objects import kinds
from octavo_operator.process import Operator, RunSettings
from octavo_operator.settings import OperatorSettings, RouterSettings
from octavo_operator.watch import kopf_source
from tests.fakes.deployments import with_images
from tests.fakes.live_operator import conditions, engines, live, operator, until
from tests.fakes.operator import make_deployment

pytestmark = pytest.mark.cluster


def test_from_yaml_to_serving_through_an_edit_to_deletion(apiserver, namespace):
    server = apiserver

    def is_serving() -> bool:
        live(server, namespace)
        found = conditions(server, namespace)
        return found["Ready"] == ("True", "Serving") and found["Progressing"][0] == "False"

    async def story() -> None:
        async with operator(server, namespace) as found:
            server.create(make_deployment(namespace=namespace, replicas=2))
            await until(is_serving)
            (first,) = engines(server, namespace)
            calls = found.metrics.calls.copy()
            writes = sum(n for (verb, _), n in calls.items() if verb not in ("get", "list"))
            assert writes <= 18  # 7 objects, 2 gates, events, and the status as it moved

            server.patch(
                make_deployment(namespace=namespace), {"spec": {"engine": {"maxNumSeqs": 7}}}
            )

            def is_replaced() -> bool:
                live(server, namespace)
                names = [body["metadata"]["name"] for body in engines(server, namespace)]
                return len(names) == 1 and names[0] != first["metadata"]["name"]

            await until(is_replaced, within_s=40)
            await until(is_serving)
            server.delete(make_deployment(namespace=namespace))
            await until(lambda: not found.world.all_keys())
            assert found.metrics.bugs == 0

    asyncio.run(story())


def test_it_leaves_no_finalizer_and_no_annotation(apiserver, namespace):
    async def story() -> None:
        async with operator(apiserver, namespace):
            apiserver.create(make_deployment(namespace=namespace))
            await until(lambda: conditions(apiserver, namespace))
        body = apiserver.get(make_deployment(namespace=namespace))
        assert "finalizers" not in body["metadata"]
        assert "annotations" not in body["metadata"]

    asyncio.run(story())


def test_drift_is_seen_by_the_watch_and_put_right(apiserver, namespace):
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": "smollm2"},
    }

    async def story() -> None:
        async with operator(apiserver, namespace):
            apiserver.create(make_deployment(namespace=namespace))
            await until(lambda: apiserver.get(service))
            await until(lambda: conditions(apiserver, namespace))
            apiserver.delete(service)
            await until(lambda: apiserver.get(service))

    asyncio.run(story())


def test_of_two_operators_one_writes_and_the_other_follows(apiserver, namespace):
    async def story() -> None:
        async with operator(apiserver, namespace, identity="one") as one:
            config = load({}, str(apiserver.kubeconfig))
            async with KubeCluster(config, field_manager="octavo-operator") as cluster:
                two = Operator(
                    config,
                    cluster,
                    with_images(OperatorSettings(namespaces=(namespace,))),
                    RunSettings(
                        namespace=namespace, identity="two", host="127.0.0.1", port=0,
                        lease=LeaseTimes(4.0, 0.5, 1.0),
                    ),
                )  # fmt: skip
                task = asyncio.create_task(two.run())
                await until(lambda: two._health().is_synced)
                apiserver.create(make_deployment(namespace=namespace))
                await until(lambda: conditions(apiserver, namespace))
                assert not any(verb in ("apply", "patch") for verb, _ in two.metrics.calls)
                one.stop()
                await until(two._may_write)
                change = {"spec": {"routing": {"holdTimeout": "9s"}}}
                apiserver.patch(make_deployment(namespace=namespace), change)

                def is_followed() -> bool:
                    service = apiserver.list("v1", "Service", namespace)
                    return any('"holdSeconds": 9' in str(s["metadata"]) for s in service)

                await until(is_followed)
                two.stop()
                async with asyncio.timeout(15):
                    await task

    asyncio.run(story())


def test_it_is_alive_and_in_step(apiserver, namespace):
    async def story() -> None:
        async with operator(apiserver, namespace) as found:
            assert found._health().is_alive
            assert found._health().is_synced
            assert "octavo_operator_is_leader" in found.metrics.render()

    asyncio.run(story())


def test_a_crd_that_goes_and_comes_back_is_survived(apiserver, namespace):
    server = apiserver

    async def story() -> None:
        async with operator(server, namespace, resync_s=1.0) as found:
            server.create(make_deployment(namespace=namespace))
            await until(lambda: conditions(server, namespace))
            name = "llmdeployments.octavo.dev"
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
            server.request("DELETE", path)
            await until(lambda: not found.world.all_keys(), within_s=30)
            await asyncio.to_thread(server.install)
            server.create(make_deployment(namespace=namespace, replicas=1))
            await until(lambda: conditions(server, namespace), within_s=40)
            assert found.metrics.bugs == 0

    try:
        asyncio.run(story())
    finally:
        server.install()  # for those who come after us


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.6, 1.0])
def test_it_stops_at_once_also_within_the_first_listing(apiserver, namespace, after_s, caplog):
    """kopf alone would take five seconds, and leave tracebacks of its streams."""

    async def story() -> float:
        config = load({}, str(apiserver.kubeconfig))
        run = RunSettings(namespace=namespace, identity="x", host="127.0.0.1", port=0)
        async with KubeCluster(config, field_manager="octavo-operator") as cluster:
            found = Operator(
                config, cluster, with_images(OperatorSettings(namespaces=(namespace,))), run
            )
            task = asyncio.create_task(found.run())
            await asyncio.wait([task], timeout=after_s)
            began_at = time.monotonic()
            found.stop()
            await task
            return time.monotonic() - began_at

    for number in range(5):
        apiserver.create(make_deployment(f"m{number}", namespace, suspend=True))
    assert asyncio.run(story()) < 1.0
    # The next one need not wait until it runs out; one that has not begun has taken none.
    leases = apiserver.list("coordination.k8s.io/v1", "Lease", namespace)
    assert len(leases) <= 1
    assert all(lease["spec"].get("holderIdentity", "") == "" for lease in leases)
    assert [record for record in caplog.records if record.exc_info] == []
    gc.collect()  # a socket that was left open fails this test, and not one that comes later


def test_a_namespace_that_is_gone_stops_no_other(apiserver, namespace, monkeypatch, caplog):
    """With a namespace goes its Role, and every watch in it is refused from then on."""
    watch_settings = kopf_source.make_settings()
    watch_settings.networking.error_backoffs = (0.1,)
    watch_settings.watching.server_timeout = 1  # rights are looked at when a watch begins
    monkeypatch.setattr(kopf_source, "make_settings", lambda: watch_settings)
    other = apiserver.make_namespace()
    roles = {place: _give_rights(apiserver, place) for place in (namespace, other)}
    full = load({}, str(apiserver.kubeconfig))
    config = KubeConfig(server=full.server, ca_pem=full.ca_pem, token=apiserver.user_token)
    settings = OperatorSettings(
        namespaces=(other, namespace), router=RouterSettings(namespace=namespace)
    )
    run = RunSettings(
        namespace=namespace, identity="x", host="127.0.0.1", port=0, lease=None,
        ask_namespaces_s=0.2,
    )  # fmt: skip

    def num_restarts() -> int:
        return sum(record.getMessage() == "The watches ended" for record in caplog.records)

    async def story() -> None:
        async with KubeCluster(config, field_manager="octavo-operator") as cluster:
            for place in roles:
                await _rights_are_known(cluster, place)
            found = Operator(config, cluster, settings, run)
            task = asyncio.create_task(found.run())
            await until(lambda: found._health().is_synced)
            apiserver.create(make_deployment("before", other, suspend=True))
            await until(lambda: found.world.has(DeploymentKey(other, "before")))  # it is watched
            rules = roles[other]["rules"]
            apiserver.patch(roles[other], {"rules": []})
            await until(num_restarts)  # the watches in it have ended, and all others with them
            for number in range(3):
                apiserver.create(make_deployment(f"m{number}", namespace, suspend=True))
                is_heard = partial(found.world.has, DeploymentKey(namespace, f"m{number}"))
                await until(is_heard, within_s=10)
                await asyncio.sleep(1.0)
            assert num_restarts() <= 2  # it may be told of several watches, but not for ever
            apiserver.patch(roles[other], {"rules": rules})
            apiserver.create(make_deployment("back", other, suspend=True))
            await until(lambda: found.world.has(DeploymentKey(other, "back")), within_s=20)
            found.stop()
            await task

    asyncio.run(story())


async def _rights_are_known(cluster: KubeCluster, namespace: str) -> None:
    """The API server learns of a Role that it has stored a moment later."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                await cluster.get(kinds.DEPLOYMENT, namespace, "none")
            except ApiRefused:
                await asyncio.sleep(0.05)
            else:
                return


def _give_rights(server, namespace):
    api, user = "rbac.authorization.k8s.io", {"kind": "User", "name": "octavo-operator"}
    meta = {"name": "operator", "namespace": namespace}
    rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    binding = {
        "apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": meta,
        "subjects": [{**user, "apiGroup": api}],
        "roleRef": {"apiGroup": api, "kind": "Role", "name": "operator"},
    }  # fmt: skip
    server.create(binding)
    role = {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": meta, "rules": [rule]}
    return server.create(role)
