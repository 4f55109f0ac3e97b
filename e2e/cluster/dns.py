"""The cluster's DNS: CoreDNS as a pod, so that network policies speak of it as anywhere else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from e2e.cluster import pause
from e2e.cluster.layout import DNS_ADDRESS

if TYPE_CHECKING:
    from e2e.cluster.layout import Layout

LABELS = {"k8s-app": "kube-dns"}
_PROGRAM = "/octavo-node"
_CONFIG = """.:53 {
    errors
    ready :8181
    cache 5
    kubernetes cluster.local in-addr.arpa
}
"""


def manifest(layout: Layout) -> str:
    """For kubectl apply."""
    objects = [
        _object("v1", "ServiceAccount", {}),
        _object("v1", "ConfigMap", {"data": {"Corefile": _CONFIG}}),
        _object("rbac.authorization.k8s.io/v1", "ClusterRole", {"rules": _rules()}),
        _object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", _binding()),
        _object("apps/v1", "Deployment", {"spec": _deployment(layout)}),
        _object("v1", "Service", {"spec": _service()}, name="kube-dns"),
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def _object(version: str, kind: str, body: dict[str, object], name: str = "coredns") -> object:
    metadata = {"name": name, "namespace": "kube-system", "labels": LABELS}
    if kind.startswith("Cluster"):
        del metadata["namespace"]
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **body}


def _rules() -> list[object]:
    return [
        {
            "apiGroups": [""],
            "resources": ["services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ]


def _binding() -> dict[str, object]:
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "coredns"}
    subject = {"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"}
    return {"roleRef": role, "subjects": [subject]}


def _deployment(layout: Layout) -> dict[str, object]:
    program = (layout.bin / "kubectl").resolve()  # all components are one program
    container = {
        "name": "coredns",
        "image": pause.IMAGE,  # holds nothing that would be in the way
        "imagePullPolicy": "Never",
        "command": [_PROGRAM, "coredns", "-conf", "/etc/coredns/Corefile"],
        "ports": [
            {"name": "dns", "containerPort": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "containerPort": 53, "protocol": "TCP"},
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [
            {"name": "program", "mountPath": _PROGRAM, "readOnly": True},
            {"name": "config", "mountPath": "/etc/coredns", "readOnly": True},
        ],
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "priorityClassName": "system-cluster-critical",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [
            {"name": "program", "hostPath": {"path": str(program), "type": "File"}},
            {"name": "config", "configMap": {"name": "coredns"}},
        ],
    }
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    return {"replicas": 1, "selector": {"matchLabels": LABELS}, "template": template}


def _service() -> dict[str, object]:
    return {
        "clusterIP": DNS_ADDRESS,
        "selector": LABELS,
        "ports": [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        ],
    }
