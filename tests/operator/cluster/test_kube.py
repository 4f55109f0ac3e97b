"""The client against a real API server: ownership, preconditions, subresources, typed errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.cluster import rbac
from octavo_operator.cluster.kube import KubeCluster, error_of
from octavo_operator.cluster.kube_config import KubeConfig, load
from octavo_operator.errors import (
    ApiRefused,
    ClusterUnavailable,
    Conflict,
    Gone,
    NotFound,
    SettingsInvalid,
)
from octavo_operator.objects import kinds
from tests.fakes.certificates import make_certificate
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.fakes.apiserver import ApiServer


def with_cluster(server: ApiServer, story: Callable[[KubeCluster], Awaitable[None]]) -> None:
    async def run() -> None:
        config = load({}, str(server.kubeconfig))
        async with KubeCluster(config, field_manager="octavo-operator") as cluster:
            await story(cluster)

    asyncio.run(run())


def config_map(namespace: str, name: str = "m", **data: str) -> kinds.Object:
    metadata = {"namespace": namespace, "name": name, "labels": {"octavo.dev/deployment": "x"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


@pytest.mark.cluster
class TestAgainstTheRealOne:
    def test_a_field_we_stop_applying_goes_and_others_fields_stay(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            await cluster.apply(config_map(namespace, a="1", b="2"))
            apiserver.patch(config_map(namespace), {"data": {"theirs": "3"}})
            stored = await cluster.apply(config_map(namespace, a="1"))
            assert stored["data"] == {"a": "1", "theirs": "3"}
            again = await cluster.apply(config_map(namespace, a="1"))
            assert again["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]

        with_cluster(apiserver, story)

    def test_what_others_overwrote_of_ours_is_taken_back(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            await cluster.apply(config_map(namespace, a="1"))
            apiserver.patch(config_map(namespace), {"data": {"a": "x"}})
            assert (await cluster.apply(config_map(namespace, a="1")))["data"] == {"a": "1"}

        with_cluster(apiserver, story)

    def test_absence_is_none_and_a_kind_that_is_not_served_is_an_error(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            assert await cluster.get(kinds.CONFIG_MAP, namespace, "none") is None
            with pytest.raises(NotFound):
                await cluster.find(kinds.POD_MONITOR, namespace)
            assert not await cluster.serves(kinds.POD_MONITOR)
            assert await cluster.serves(kinds.LLM_DEPLOYMENT)

        with_cluster(apiserver, story)

    def test_lists_come_in_pages_with_their_kind_and_version(
        self, apiserver, namespace, monkeypatch
    ):
        monkeypatch.setattr("octavo_operator.cluster.kube.PAGE", 3)

        async def story(cluster: KubeCluster) -> None:
            for number in range(8):
                await cluster.apply(config_map(namespace, f"m{number}"))
            listing = await cluster.find(
                kinds.CONFIG_MAP, namespace, selector="octavo.dev/deployment=x"
            )
            assert [kinds.name_of(item) for item in listing.items] == [f"m{n}" for n in range(8)]
            assert {item["kind"] for item in listing.items} == {"ConfigMap"}
            newest = max(int(item["metadata"]["resourceVersion"]) for item in listing.items)
            assert listing.version >= newest

        with_cluster(apiserver, story)

    def test_a_list_whose_next_page_has_expired_is_requested_anew_and_whole(
        self, apiserver, namespace, monkeypatch
    ):
        monkeypatch.setattr("octavo_operator.cluster.kube.PAGE", 3)
        queries: list[dict[str, str]] = []

        async def story(cluster: KubeCluster) -> None:
            send = cluster._send

            async def expiring(*args: Any, query: dict[str, str], **more: Any) -> bytes:
                queries.append(dict(query))
                if "continue" in query:
                    raise error_of(410, b'{"reason": "Expired"}')
                return await send(*args, query=query, **more)

            for number in range(8):
                await cluster.apply(config_map(namespace, f"m{number}"))
            monkeypatch.setattr(cluster, "_send", expiring)
            selector = "octavo.dev/deployment=x"
            listing = await cluster.find(kinds.CONFIG_MAP, namespace, selector=selector)
            assert [kinds.name_of(item) for item in listing.items] == [f"m{n}" for n in range(8)]
            first, second, last = queries
            assert first == {"limit": "3", "labelSelector": selector}
            assert second.keys() == {"limit", "labelSelector", "continue"}
            assert last == {"labelSelector": selector}

        with_cluster(apiserver, story)

    def test_deletes_spare_a_namesake_and_what_has_changed(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            stored = await cluster.apply(config_map(namespace, a="1"))
            uid, version = kinds.uid_of(stored), stored["metadata"]["resourceVersion"]
            place = (kinds.CONFIG_MAP, namespace, "m")
            with pytest.raises(Conflict):
                await cluster.delete(*place, uid="00000000-0000-0000-0000-000000000000")
            await cluster.apply(config_map(namespace, a="2"))
            with pytest.raises(Conflict):
                await cluster.delete(*place, uid=uid, resource_version=version)
            await cluster.delete(*place, uid=uid)
            assert await cluster.get(*place) is None
            await cluster.delete(*place, uid=uid)

        with_cluster(apiserver, story)

    def test_patches_carry_preconditions(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            stored = await cluster.apply(config_map(namespace, a="1"))
            await cluster.apply(config_map(namespace, a="2"))
            version = stored["metadata"]["resourceVersion"]
            with pytest.raises(Conflict):
                await cluster.patch(
                    kinds.CONFIG_MAP, namespace, "m", {"metadata": {"resourceVersion": version}}
                )
            with pytest.raises((Conflict, ApiRefused)):
                await cluster.patch(
                    kinds.CONFIG_MAP, namespace, "m", {"metadata": {"uid": "other"}}
                )

        with_cluster(apiserver, story)

    def test_the_status_has_its_own_way_and_its_own_resource(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            stored = apiserver.create(make_deployment(namespace=namespace))
            head = {key: stored[key] for key in ("apiVersion", "kind")}
            names = ("namespace", "name", "uid", "resourceVersion")
            meta = {key: stored["metadata"][key] for key in names}
            status = {"observedGeneration": 1, "replicas": 2}
            written = await cluster.apply_status({**head, "metadata": meta, "status": status})
            assert written["status"] == status
            assert written["metadata"]["generation"] == 1
            with pytest.raises(Conflict):  # it has changed since
                await cluster.apply_status({**head, "metadata": meta, "status": {}})
            apiserver.delete(make_deployment(namespace=namespace))
            with pytest.raises(NotFound):
                await cluster.apply_status({**head, "metadata": meta, "status": status})
            apiserver.create(make_deployment(namespace=namespace))
            with pytest.raises(Conflict):  # another of the same name
                await cluster.apply_status({**head, "metadata": meta, "status": status})

        with_cluster(apiserver, story)

    def test_a_gate_is_opened_beside_other_conditions(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            pod = apiserver.create(make_pod(namespace))
            condition = {"type": "PodScheduled", "status": "True"}
            apiserver.patch(pod, {"status": {"conditions": [condition]}}, subresource="status")
            gate = {"type": "octavo.dev/Routable", "status": "True", "podUid": kinds.uid_of(pod)}
            stored = await cluster.set_pod_condition(namespace, "p", gate)
            assert {c["type"]: c["status"] for c in stored["status"]["conditions"]} == {
                "PodScheduled": "True",
                "octavo.dev/Routable": "True",
            }
            with pytest.raises((Conflict, ApiRefused)):
                await cluster.set_pod_condition(namespace, "p", {**gate, "podUid": "other"})

        with_cluster(apiserver, story)

    def test_refusals_carry_the_servers_words(self, apiserver, namespace):
        async def story(cluster: KubeCluster) -> None:
            body = make_deployment(namespace=namespace, replicas=-1)
            with pytest.raises(ApiRefused) as caught:
                await cluster.create(body)
            assert caught.value.status == 422
            assert "spec.replicas" in caught.value.message

        with_cluster(apiserver, story)

    def test_a_wrong_token_and_a_dead_server_are_worth_another_try(self, apiserver):
        async def story() -> None:
            good = load({}, str(apiserver.kubeconfig))
            wrong = KubeConfig(server=good.server, ca_pem=good.ca_pem, token="nobody")
            async with KubeCluster(wrong, field_manager="m") as cluster:
                with pytest.raises(ClusterUnavailable) as caught:
                    await cluster.get(kinds.CONFIG_MAP, "default", "x")
                assert caught.value.status == 401
            dead = KubeConfig(server="https://127.0.0.1:9", ca_pem=good.ca_pem)
            async with KubeCluster(dead, field_manager="m") as cluster:
                with pytest.raises(ClusterUnavailable):
                    await cluster.get(kinds.CONFIG_MAP, "default", "x")

        asyncio.run(story())

    def test_a_renewed_token_is_read_from_its_file(self, apiserver, tmp_path):
        async def story() -> None:
            good = load({}, str(apiserver.kubeconfig))
            file = tmp_path / "token"
            file.write_text("expired\n")
            config = KubeConfig(server=good.server, ca_pem=good.ca_pem, token_file=file)
            async with KubeCluster(config, field_manager="m") as cluster:
                with pytest.raises(ClusterUnavailable):
                    await cluster.get(kinds.CONFIG_MAP, "default", "x")
                file.write_text(apiserver.token + "\n")
                assert await cluster.get(kinds.CONFIG_MAP, "default", "x") is None

        asyncio.run(story())

    def test_changed_authorities_are_read_from_their_file(self, apiserver, tmp_path):
        """A cluster rotates them; nobody restarts us for it."""

        async def story() -> None:
            good = load({}, str(apiserver.kubeconfig))
            file = tmp_path / "ca.crt"
            file.write_text(make_certificate(tmp_path, "127.0.0.1").read_text())
            config = KubeConfig(server=good.server, ca_file=file, token=apiserver.token)
            async with KubeCluster(config, field_manager="m") as cluster:
                with pytest.raises(ClusterUnavailable):
                    await cluster.get(kinds.CONFIG_MAP, "default", "x")
                file.write_text(good.ca_pem)
                with pytest.raises(ClusterUnavailable):  # and now it knows
                    await cluster.get(kinds.CONFIG_MAP, "default", "x")
                assert await cluster.get(kinds.CONFIG_MAP, "default", "x") is None

        asyncio.run(story())

    def test_its_role_is_enough_for_what_it_does(self, apiserver, namespace):
        """And the table is what grants it: the same calls without it are refused."""
        apiserver.create(rbac.role("served", rbac.SERVED, namespace=namespace))
        good = load({}, str(apiserver.kubeconfig))
        config = KubeConfig(server=good.server, ca_pem=good.ca_pem, token=apiserver.user_token)

        async def story() -> None:
            async with KubeCluster(config, field_manager="octavo-operator") as cluster:
                with pytest.raises(ApiRefused):
                    await cluster.apply(config_map(namespace))
                apiserver.create(binding(namespace, apiserver.user))
                async with asyncio.timeout(60):
                    while True:
                        try:
                            await cluster.apply(config_map(namespace))
                            break
                        except ApiRefused:  # the authorizer's cache follows
                            await asyncio.sleep(0.05)
                apiserver.create(make_deployment(namespace=namespace))
                found = await cluster.find(kinds.LLM_DEPLOYMENT, namespace)
                assert len(found.items) == 1
                with pytest.raises(ApiRefused):
                    await cluster.find(kinds.LLM_DEPLOYMENT, None)
                with pytest.raises(ApiRefused):
                    await cluster.delete(kinds.VOLUME_CLAIM, namespace, "c", uid="u")

        asyncio.run(story())


def binding(namespace: str, user: str) -> kinds.Object:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"namespace": namespace, "name": "served"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "served"
        },
        "subjects": [
            {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
        ],
    }  # fmt: skip


def make_pod(namespace: str) -> kinds.Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, ApiRefused), (401, ClusterUnavailable), (403, ApiRefused), (404, NotFound),
        (408, ClusterUnavailable), (409, Conflict), (410, Gone), (413, ApiRefused), (422,
        ApiRefused),
        (429, ClusterUnavailable), (500, ClusterUnavailable), (503, ClusterUnavailable),
        (504, ClusterUnavailable),
    ],
)  # fmt: skip
def test_each_status_has_its_exception(status, error):
    found = error_of(status, b'{"message": "m", "reason": "R"}')
    assert type(found) is error
    assert (found.message, found.reason, found.status) == ("m", "R", status)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("1", 1.0), ("60", 60.0), ("garbage", None), ("", None), ("-5", None),
     ("1e9", 300.0), ("nan", None)],
)  # fmt: skip
def test_retry_after_is_believed_within_reason(text, seconds):
    error = error_of(429, b"busy", text)
    assert isinstance(error, ClusterUnavailable)
    assert error.retry_after_s == seconds


def test_a_webhook_that_cannot_be_called_is_somebodys_to_repair():
    body = b'{"message": "Internal error occurred: failed calling webhook \\"v\\": refused"}'
    assert isinstance(error_of(500, body), ApiRefused)


@pytest.mark.parametrize("content", [b"", b"<html>", b"[1]", b'"x"', b'{"message": null}'])
def test_answers_that_are_no_status_objects_are_survived(content):
    assert error_of(503, content).status == 503


class TestKubeConfig:
    def test_a_file_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(SettingsInvalid) as caught:
            load({}, str(tmp_path / "none"))
        assert str(caught.value) == (
            f"cannot read the kubeconfig {tmp_path}/none: No such file or directory; "
            "name another one in --kubeconfig or KUBECONFIG"
        )

    def test_in_a_pod(self, tmp_path):
        for name in ("ca.crt", "namespace", "token"):
            (tmp_path / name).write_text(f"{name}\n")
        from octavo_operator.cluster.kube_config import from_service_account

        environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
        config = from_service_account(environment, tmp_path)
        assert config.server == "https://[fd00::1]:6443"
        assert config.namespace == "namespace"
        assert config.read_token() == "token"

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("[]", "must be an object"),
            ("current-context: a", "no context named 'a'"),
            ("{a: b", "is not valid YAML: while parsing a flow mapping"),
            (
                "{current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}], "
                "clusters: [{name: c, cluster: {server: 'https://x'}}], "
                "users: [{name: u, user: {exec: {command: aws}}}]}",
                "exec of the kubeconfig's user has apiVersion ''; known: client.authentication",
            ),
            (
                "{current-context: a, contexts: [{name: a, context: {cluster: c, user: u}}], "
                "clusters: [{name: c, cluster: {server: 'https://x'}}], "
                "users: [{name: u, user: {auth-provider: {name: gcp}}}]}",
                "has an auth-provider",
            ),
        ],
    )
    def test_what_is_wrong_with_a_file_is_said(self, tmp_path, content, problem):
        file = tmp_path / "config"
        file.write_text(content)
        with pytest.raises(SettingsInvalid, match=problem):
            load({}, str(file))

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(SettingsInvalid, match="cannot read the kubeconfig"):
            load({"KUBECONFIG": str(tmp_path / "none")})

    def test_secrets_are_not_shown(self):
        assert "hunter2" not in repr(KubeConfig(server="s", token="hunter2", key_pem="hunter2"))
