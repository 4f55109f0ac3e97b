"""Nobody may leave: the platform serves all the same, and what is not needed is denied."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from e2e.cluster import images
from e2e.helm import NAMESPACE
from e2e.models import Model, real
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

DENIAL = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "no-egress"},
    "spec": {"podSelector": {}, "policyTypes": ["Egress"]},
}
# Prints "reached" or "denied": a listener that exists, but that no pod here needs.
KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 8181), timeout=3)
except OSError:
    print("denied")
else:
    print("reached")
"""


def test_the_platform_serves_where_all_egress_is_denied(
    platform: Platform, space: Kubectl, kubectl: Kubectl
) -> None:
    dns = address_of_dns(kubectl)
    assert knock_of_a_stranger(space, dns) == "reached", "else the denials below mean nothing"
    with ExitStack() as undo:
        for namespace in (space.namespace, NAMESPACE):
            deny(kubectl, namespace)
            undo.callback(kubectl, *DELETION, f"--namespace={namespace}")
        model = Model(space, real("offline"))
        model.await_settled()
        with Traffic(platform.base_url, model.name, clients=2, tokens=8) as traffic:
            traffic.await_answers(6)
        traffic.assert_unbroken(at_least=6)
        engine = model.pods()[0]["metadata"]["name"]
        assert knock(kubectl, space.namespace, engine, dns) == "denied"
        assert knock(kubectl, NAMESPACE, platform.pods("router")[0], dns) == "denied"
        assert knock(kubectl, NAMESPACE, platform.pods("operator")[0], dns) == "denied"


DELETION = ("delete", "networkpolicy", "no-egress")


def deny(kubectl: Kubectl, namespace: str) -> None:
    metadata: dict[str, Any] = {"name": "no-egress", "namespace": namespace}
    kubectl.apply({**DENIAL, "metadata": metadata})


def knock(kubectl: Kubectl, namespace: str, pod: str, address: str) -> str:
    words = ("exec", f"--namespace={namespace}", pod, "--")
    return kubectl(*words, "python3", "-c", KNOCK, address).strip()


def knock_of_a_stranger(space: Kubectl, address: str) -> str:
    """Of a pod that no policy speaks of."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "main",
        "image": images.reference("router"),
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", KNOCK, address],
        "securityContext": security,
    }
    spec = {"restartPolicy": "Never", "containers": [container]}
    space.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "free"}, "spec": spec})
    space.wait("pod/free", "jsonpath={.status.phase}=Succeeded")
    return space("logs", "free").strip()


def address_of_dns(kubectl: Kubectl) -> str:
    words = ("get", "pods", "--namespace=kube-system", "--selector=k8s-app=kube-dns")
    return kubectl(*words, "--output=jsonpath={.items[0].status.podIP}")
