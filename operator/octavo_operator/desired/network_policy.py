"""The NetworkPolicy: routers and monitoring reach engines; engines reach their weights' source."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, ROUTER_COMPONENT
from octavo_operator import labels, names
from octavo_operator.desired.metadata import child
from octavo_operator.desired.probes import PORT_NAME

if TYPE_CHECKING:
    from octavo_operator.settings import Settings
    from octavo_operator.spec import LLMDeployment

NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"  # the API server sets it
# Cloud machines hand out their credentials there.
LINK_LOCAL = MappingProxyType({"0.0.0.0/0": ["169.254.0.0/16"], "::/0": ["fe80::/10"]})


def network_policy(deployment: LLMDeployment, settings: Settings) -> dict[str, Any]:
    name = names.network_policy(deployment.name)
    routers = {"matchLabels": {COMPONENT_LABEL: ROUTER_COMPONENT}}
    callers = [
        {"podSelector": routers, "namespaceSelector": _namespace(settings.router.namespace)},
        {"podSelector": routers},  # one beside the engines, in their own namespace
        {"namespaceSelector": _namespace(settings.monitoring_namespace)},
    ]
    spec: dict[str, Any] = {
        "podSelector": {"matchLabels": labels.engines(deployment.name)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": callers, "ports": [{"port": PORT_NAME, "protocol": "TCP"}]}],
    }
    if deployment.model.is_fetched and deployment.device != "sim":
        spec["egress"] = _to_the_source()  # else none: weights are there already
    return {**child(deployment, "networking.k8s.io/v1", "NetworkPolicy", name), "spec": spec}


def _to_the_source() -> list[dict[str, Any]]:
    """Names, and any host but the node's own services: a policy knows no host names."""
    dns = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    anywhere = [{"ipBlock": {"cidr": cidr, "except": but}} for cidr, but in LINK_LOCAL.items()]
    return [{"ports": dns}, {"to": anywhere}]


def _namespace(name: str) -> dict[str, Any]:
    return {"matchLabels": {NAMESPACE_NAME_LABEL: name}}
