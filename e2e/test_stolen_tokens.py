"""An attacker has the token of a component: real calls from a pod with its account."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from charts.sources.rights import Right, rights
from e2e.helm import NAMESPACE, RELEASE
from e2e.kubectl import Kubectl
from e2e.models import Model, simulated
from e2e.test_cluster import pod

if TYPE_CHECKING:
    from e2e.conftest import Platform

CALLS = """
import json, os, ssl, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount"
tls = ssl.create_default_context(cafile=f"{account}/ca.crt")
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
token = open(f"{account}/token").read()

def call(method, path, body=None, more=None):
    data = None if body is None else json.dumps(body).encode()
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    headers = {"authorization": f"Bearer {token}", "content-type": kind, **(more or {})}
    request = urllib.request.Request(f"https://{host}:{port}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20, context=tls) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}

answers = {name: call(*words) for name, words in json.loads(CALLS).items()}
print(json.dumps({name: status for name, (status, _) in answers.items()}))
print(json.dumps(answers["rules"][1]["status"]["resourceRules"]))
"""
RULES = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
OURS = "/apis/octavo.dev/v1alpha1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def attempts(victim: str) -> dict[str, list[Any]]:
    """What an attacker tries; `victim`: a namespace with a Service and a Deployment `theirs`."""
    of_victim = f"/api/v1/namespaces/{victim}"
    harmless = {"spec": {"containers": [{"name": "c", "image": "none"}]}}
    named: dict[str, Any] = {"metadata": {"name": "mine"}}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    labels = {"a": "b"}
    template = {"metadata": {"labels": labels}, **harmless}
    deployment = {**named, "spec": {"selector": {"matchLabels": labels}, "template": template}}
    group = {"impersonate-user": "admin", "impersonate-group": "system:masters"}
    return {
        "secrets of all": ["GET", "/api/v1/secrets"],
        "secrets here": ["GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"],
        "secrets there": ["GET", f"{of_victim}/secrets"],
        "a pod": ["POST", f"{of_victim}/pods", {**named, **harmless}],
        "exec": ["POST", f"{of_victim}/pods/theirs/exec?command=id&stdout=true"],
        "a debugging container": ["PATCH", f"{of_victim}/pods/theirs/ephemeralcontainers", {}],
        "port-forward": ["POST", f"{of_victim}/pods/theirs/portforward?ports=8000"],
        "a token": ["POST", f"{of_victim}/serviceaccounts/default/token", {"spec": {}}],
        "rights": ["POST", f"{RBAC}/clusterrolebindings", {**named, "roleRef": role}],
        "rights there": ["POST", f"{RBAC}/namespaces/{victim}/rolebindings",
                         {**named, "roleRef": role}],
        "nodes": ["GET", "/api/v1/nodes"],
        "a node": ["PATCH", "/api/v1/nodes/any", {"metadata": {"labels": labels}}],
        "another's name": ["GET", "/api/v1/pods", None, group],
        "a webhook": ["POST", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
                      named],
        "the policies": ["DELETE", "/apis/admissionregistration.k8s.io/v1/"
                         f"validatingadmissionpolicies/{RELEASE}-operator-{NAMESPACE}"],
        "a model": ["DELETE", f"{OURS}/namespaces/{victim}/llmdeployments/theirs"],
        "their Service": ["PATCH", f"{of_victim}/services/theirs",
                          {"metadata": {"annotations": {"octavo.dev/routing": "{}"}}}],
        "their Deployment": ["DELETE", f"/apis/apps/v1/namespaces/{victim}/deployments/theirs"],
        "a Deployment": ["POST", f"/apis/apps/v1/namespaces/{victim}/deployments", deployment],
        "a volume": ["DELETE", f"{of_victim}/persistentvolumeclaims/theirs"],
    }  # fmt: skip


def steal(where: Kubectl, account: str, victim: str) -> tuple[dict[str, int], set[Right]]:
    """What a pod with this account was answered, and the rights that the API server says it has."""
    calls = {
        "pods": ["GET", "/api/v1/pods?limit=1"], **attempts(victim),
        "rules": ["POST", RULES, {"spec": {"namespace": victim}}],
    }  # fmt: skip
    program = f"CALLS = {json.dumps(calls)!r}\n{CALLS}"
    body = pod("thief", "router", command=["python3", "-c", program])
    body["spec"] |= {"automountServiceAccountToken": True, "serviceAccountName": account}
    where.apply(body)
    try:
        where.wait("pod/thief", "jsonpath={.status.phase}=Succeeded")
        statuses, rules = map(json.loads, where("logs", "thief").splitlines())
    finally:
        where("delete", "pod", "thief", "--grace-period=1")
    found = {
        Right("", verb, group, resource, "", name)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or [""]
        if group not in ("authentication.k8s.io", "authorization.k8s.io")  # everybody's
    }
    return statuses, found


@pytest.fixture
def victim(space: Kubectl) -> str:
    """A namespace with objects that are not ours."""
    labels = {"app": "theirs"}
    space.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "theirs"},
         "spec": {"selector": labels, "ports": [{"port": 80}]}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "theirs"},
         "spec": {"replicas": 0, "selector": {"matchLabels": labels},
                  "template": {"metadata": {"labels": labels},
                               "spec": {"containers": [{"name": "c", "image": "none"}]}}}},
    )  # fmt: skip
    return space.namespace


@pytest.mark.parametrize("component", ["operator", "router"])
def test_a_stolen_token_can_do_what_the_table_says_and_harms_nobody(
    platform: Platform, victim: str, component: str
) -> None:
    system = Kubectl(platform.node, NAMESPACE)
    statuses, live = steal(system, f"{RELEASE}-{component}", victim)
    assert statuses.pop("pods") == 200, "the token is no good, and so nothing was tried"
    statuses.pop("rules")
    assert {name: status for name, status in statuses.items() if status != 403} == {}
    manifest = [
        body for body in yaml.safe_load_all(platform.helm("get", "manifest", RELEASE)) if body
    ]
    wanted = {
        Right("", right.verb, right.group, right.resource, "", right.name)
        for right in rights(manifest)
        if right.component == component and right.namespace in ("", victim)
    }
    assert live == wanted
    there = Kubectl(platform.node, victim)
    assert "annotations" not in there.get("service", "theirs")["metadata"]
    assert there.get("deployment", "theirs")["metadata"]["name"] == "theirs"


def test_an_engine_has_no_token_and_its_account_no_rights(
    platform: Platform, space: Kubectl, victim: str
) -> None:
    model = Model(space, simulated("guarded"))
    model.await_settled()
    for body in model.pods():
        assert body["spec"]["automountServiceAccountToken"] is False
        mounts = [m["mountPath"] for c in body["spec"]["containers"] for m in c["volumeMounts"]]
        assert not [path for path in mounts if "kubernetes.io" in path]
        account = body["spec"]["serviceAccountName"]
    statuses, live = steal(space, account, victim)
    assert statuses.pop("rules") == 201
    assert set(statuses.values()) == {403}
    assert live == set()
