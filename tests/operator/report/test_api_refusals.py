"""What the API server itself refuses of ours: quota, policy and rights, told in its own words."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.cluster.kube_config import KubeConfig, load
from tests.fakes.apiserver import ApiError
from tests.fakes.live_operator import conditions, engines, operator, until
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_operator.objects.kinds import Object
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster
WITHIN_S = 10.0
NO_ENGINES = {"count/deployments.apps": "0"}


def quota(namespace: str) -> Object:
    """In force once its status is there, which a controller would write."""
    return {
        "apiVersion": "v1", "kind": "ResourceQuota",
        "metadata": {"name": "no-engines", "namespace": namespace},
        "spec": {"hard": NO_ENGINES},
    }  # fmt: skip


def policy(namespace: str, name: str) -> list[Object]:
    """No Deployment in this namespace may have a container without a CPU limit."""
    api = "admissionregistration.k8s.io/v1"
    here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    rule = {
        "apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
        "resources": ["deployments"],
    }  # fmt: skip
    limited = "object.spec.template.spec.containers.all(c, has(c.resources.limits))"
    return [
        {
            "apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [rule], "namespaceSelector": here},
                "validations": [{"expression": limited, "message": "containers need limits"}],
            },
        },
        {
            "apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    ]  # fmt: skip


def events(server: ApiServer, namespace: str, reason: str) -> list[str]:
    path = f"/api/v1/namespaces/{namespace}/events"
    found = server.request("GET", path, fieldSelector=f"reason={reason},type=Warning")
    return [str(item["message"]) for item in found["items"]]


def ready_message(server: ApiServer, namespace: str) -> str:
    body = server.get(make_deployment(namespace=namespace))
    (found,) = (c["message"] for c in body["status"]["conditions"] if c["type"] == "Ready")
    return str(found)


async def reported(server: ApiServer, namespace: str, reason: str, words: str) -> None:
    """On Ready and in an Event, in time."""
    await until(
        lambda: conditions(server, namespace)["Ready"] == ("False", reason), within_s=WITHIN_S
    )
    assert words in ready_message(server, namespace)
    await until(
        lambda: any(words in text for text in events(server, namespace, reason)),
        within_s=WITHIN_S,
    )


def run(story: Callable[[], Any]) -> None:
    asyncio.run(story())


def test_a_quota_is_named_and_when_it_goes_the_engines_come(apiserver: ApiServer, namespace: str):
    stored = apiserver.create(quota(namespace))
    used = {"count/deployments.apps": "0"}
    apiserver.patch(stored, {"status": {"hard": NO_ENGINES, "used": used}}, subresource="status")

    async def story() -> None:
        async with operator(apiserver, namespace, lease=None):
            apiserver.create(make_deployment(namespace=namespace))
            await reported(apiserver, namespace, "QuotaExceeded", "exceeded quota: no-engines")
            assert engines(apiserver, namespace) == []
            apiserver.delete(stored)
            await until(lambda: len(engines(apiserver, namespace)) == 1)
            await until(lambda: conditions(apiserver, namespace)["Degraded"][0] == "False")

    run(story)


def test_a_policy_is_named_and_an_edit_that_suits_it_goes_through(
    apiserver: ApiServer, namespace: str
):
    name = f"limits-{namespace}"
    objects = [apiserver.create(body) for body in policy(namespace, name)]
    probe = {
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            },
        },
    }  # fmt: skip
    deadline = time.monotonic() + 30
    with contextlib.suppress(ApiError):  # it takes the server a moment to enforce a new policy
        while time.monotonic() < deadline:
            apiserver.create(probe, dry_run=True)

    async def story() -> None:
        async with operator(apiserver, namespace, lease=None):
            deployment = make_deployment(namespace=namespace)
            apiserver.create(deployment)
            await reported(apiserver, namespace, "WebhookDenied", "containers need limits")
            limits = {"limits": {"cpu": "1", "memory": "1Gi"}}
            apiserver.patch(deployment, {"spec": {"resources": limits}})
            await until(lambda: len(engines(apiserver, namespace)) == 1)
            await until(lambda: conditions(apiserver, namespace)["Degraded"][0] == "False")

    try:
        run(story)
    finally:
        for body in objects:
            apiserver.delete(body)


def test_the_api_servers_message_is_in_the_condition(apiserver: ApiServer, namespace: str):
    """podTemplate is laid over as it is: its mistakes are found by those who know pods."""
    sleep = {"preStop": {"sleep": {"seconds": -5}}}
    template = {"spec": {"containers": [{"name": "engine", "lifecycle": sleep}]}}

    async def story() -> None:
        async with operator(apiserver, namespace, lease=None):
            deployment = make_deployment(namespace=namespace, podTemplate=template)
            apiserver.create(deployment)
            await reported(apiserver, namespace, "ObjectRefused", "preStop.sleep")
            apiserver.patch(deployment, {"spec": {"podTemplate": None}})
            await until(lambda: len(engines(apiserver, namespace)) == 1)
            await until(lambda: conditions(apiserver, namespace)["Degraded"][0] == "False")

    run(story)


def test_a_right_that_is_missing_is_told_and_missed_no_more_once_it_is_there(
    apiserver: ApiServer, namespace: str
):
    """All rights but one: of Deployments it may do nothing but look."""
    everything = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]}
    writes = {
        "apiGroups": ["", "octavo.dev", "policy", "networking.k8s.io"], "resources": ["*"],
        "verbs": ["create", "patch", "update", "delete"],
    }  # fmt: skip
    api, user = "rbac.authorization.k8s.io", {"kind": "User", "name": "octavo-operator"}
    meta = {"name": "most", "namespace": namespace}
    role = {
        "apiVersion": f"{api}/v1", "kind": "Role", "metadata": meta, "rules": [everything, writes],
    }  # fmt: skip
    binding = {
        "apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": meta,
        "subjects": [{**user, "apiGroup": api}],
        "roleRef": {"apiGroup": api, "kind": "Role", "name": "most"},
    }  # fmt: skip
    stored = apiserver.create(role)
    apiserver.create(binding)
    full = load({}, str(apiserver.kubeconfig))
    config = KubeConfig(server=full.server, ca_pem=full.ca_pem, token=apiserver.user_token)

    async def story() -> None:
        async with operator(apiserver, namespace, lease=None, config=config):
            apiserver.create(make_deployment(namespace=namespace))
            await reported(apiserver, namespace, "OperatorForbidden", "cannot patch resource")
            more = {**writes, "apiGroups": ["apps"]}
            apiserver.patch(stored, {"rules": [everything, writes, more]})
            await until(lambda: len(engines(apiserver, namespace)) == 1)
            await until(lambda: conditions(apiserver, namespace)["Degraded"][0] == "False")

    run(story)
