"""The cluster with our images: they run restricted, names resolve, policies hold, tokens come."""

from __future__ import annotations

import time
import urllib.error
from typing import TYPE_CHECKING, Any

import pytest

from e2e.chat import chat
from e2e.cluster import images

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.cluster.choose import Cluster
    from e2e.kubectl import Kubectl

ENGINE = {"app": "engine"}
NODE_HEARS_S = 30.0
SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def pod(name: str, image: str, *args: str, **container: Any) -> dict[str, Any]:
    """Restricted, and with the user that the image names."""
    labels = container.pop("labels", {})
    main = {
        "name": "main",
        "image": images.reference(image),
        "imagePullPolicy": "Never",
        "args": list(args),
        "securityContext": SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **container,
    }
    spec = {
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": POD_SECURITY,
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def space(kubectl: Kubectl) -> Iterator[Kubectl]:
    with kubectl.own_namespace("smoke") as inside:
        yield inside


@pytest.fixture(scope="module")
def engine(space: Kubectl) -> Kubectl:
    """The real model behind a Service of type NodePort, in the returned namespace."""
    ready = {"httpGet": {"path": "/ready", "port": 8000}, "periodSeconds": 1}
    space.apply(
        pod(
            *("engine", "engine-cpu", "demo://smollm2"),
            *("--served-model-name=smollm2", "--host=0.0.0.0"),
            "--served-model-name=smollm2",
            labels=ENGINE,
            readinessProbe=ready,
        ),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "engine"},
            "spec": {"type": "NodePort", "selector": ENGINE, "ports": [{"port": 8000}]},
        },
    )
    space.wait("pod/engine", "condition=Ready", timeout_s=90)
    return space


def test_engine_answers_with_the_real_model(engine: Kubectl, node: Cluster) -> None:
    port = engine.get("service", "engine")["spec"]["ports"][0]["nodePort"]
    assert "Paris" in answer_of(f"http://{node.node_address}:{port}")


def answer_of(url: str) -> str:
    """Of a pod that has just become ready: its node hears of that a moment later."""
    began_at = time.monotonic()
    while True:
        try:
            return chat(url)
        except urllib.error.URLError:
            if time.monotonic() - began_at > NODE_HEARS_S:
                raise
            time.sleep(0.2)


def test_service_is_found_by_its_name_from_a_pod(engine: Kubectl) -> None:
    url = f"http://engine.{engine.namespace}.svc.cluster.local:8000/ready"
    assert ran(engine, "by-name", "router", fetch(url)) == "200\n"


@pytest.mark.parametrize("image", images.NAMES)
def test_image_says_its_version_without_a_place_to_write(space: Kubectl, image: str) -> None:
    body = pod(f"version-{image}", image, command=["octavo", "--version"])
    del body["spec"]["volumes"], body["spec"]["containers"][0]["volumeMounts"]
    space.apply(body)
    space.wait(f"pod/version-{image}", "jsonpath={.status.phase}=Succeeded")
    assert space("logs", f"version-{image}").startswith("octavo 0.")


def test_policies_are_enforced_both_ways(engine: Kubectl) -> None:
    """Only a pod that the policy names reaches the engine; a pod without egress reaches nothing."""
    url = f"http://engine.{engine.namespace}.svc.cluster.local:8000/ready"
    engine.apply(
        policy(
            "engine",
            ENGINE,
            ingress=[{"from": [{"podSelector": {"matchLabels": {"may": "enter"}}}]}],
        ),
        policy("shut-in", {"may": "not-leave"}, egress=[]),
    )
    try:
        assert ran(engine, "guest", "router", fetch(url), labels={"may": "enter"}) == "200\n"
        assert ran(engine, "stranger", "router", fetch(url, "refused")) == "refused\n"
        outside = fetch("https://10.96.0.1/", "refused")  # the API, which no policy isolates
        assert ran(engine, "shut-in", "router", outside, {"may": "not-leave"}) == "refused\n"
        assert "CERTIFICATE" in ran(engine, "free", "router", TLS_ERROR)
    finally:
        engine("delete", "networkpolicy", "--all")


def policy(name: str, selected: dict[str, str], **rules: Any) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": selected},
            "policyTypes": [key.capitalize() for key in rules],
            **rules,
        },
    }


FETCH = """
import time, urllib.error, urllib.request

def outcome():
    try:
        return str(urllib.request.urlopen(url, timeout=5).status)
    except urllib.error.URLError:
        return "refused"

# The rules learn of a new pod's address a moment after it runs.
end = time.monotonic() + 20
while outcome() != wanted and time.monotonic() < end:
    time.sleep(0.1)
print(*{outcome() for _ in range(5)})
"""


TLS_ERROR = """
import urllib.error, urllib.request
try:
    urllib.request.urlopen("https://10.96.0.1/", timeout=5)
except urllib.error.URLError as error:
    print(error)
"""


def fetch(url: str, wanted: str = "200") -> str:
    """A program that prints the status, or "refused" where it may not pass, once that stays so."""
    return f"url, wanted = {url!r}, {wanted!r}\n{FETCH}"


def ran(
    space: Kubectl, name: str, image: str, program: str, labels: dict[str, str] | None = None
) -> str:
    """What a pod printed that did nothing else."""
    space.apply(pod(name, image, command=["python3", "-c", program], labels=labels or {}))
    space.wait(f"pod/{name}", "jsonpath={.status.phase}=Succeeded")
    return space("logs", name)
