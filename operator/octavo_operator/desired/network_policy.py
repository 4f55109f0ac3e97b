"""The NetworkPolicy: routers and monitoring reach engines; engines reach their weights' source.

They reach the bucket of their KV blocks by the same rule.

Pods that answer also reach the KV blocks of prefill pods, and of each other where they change
sides; nobody else does. The pods of a group
reach each other by a policy of their own: see group.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import KV_PORT
from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    PREFILL_COMPONENT,
    ROUTER_COMPONENT,
)
from octavo_operator.desired.metadata import child
from octavo_operator.desired.probes import PORT_NAME
from octavo_operator.objects import labels, names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import LLMDeployment

NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"  # the API server sets it
# Where clouds hand out the credentials of their machines, besides what is link-local: Azure,
# Alibaba and, by its unique local addresses, AWS.
NOT_ANYWHERE = MappingProxyType(
    {
        "0.0.0.0/0": ["169.254.0.0/16", "168.63.129.16/32", "100.100.100.200/32"],
        "::/0": ["fe80::/10", "fd00:ec2::/32"],
    }
)
# Who gives a pod the credentials of its own ServiceAccount, by scheme: (address, port). Opened
# where the model's source needs some and no Secret has them.
IDENTITIES = MappingProxyType(
    {
        "gs": (("169.254.169.254/32", 80), ("169.254.169.252/32", 988)),  # GKE's metadata server
        "s3": (("169.254.170.23/32", 80), ("fd00:ec2::23/128", 80)),  # EKS' Pod Identity agent
    }
)
# NOTE: a policy sees the port of the pod behind the Service: OpenShift's DNS listens on 5353.
DNS_PORTS = (53, 5353)


def network_policy(deployment: LLMDeployment, settings: OperatorSettings) -> dict[str, Any]:
    name = names.network_policy(deployment.name)
    routers = {"matchLabels": {COMPONENT_LABEL: ROUTER_COMPONENT}}
    callers = [
        {"podSelector": routers, "namespaceSelector": _namespace(settings.router.namespace)},
        {"podSelector": routers},  # one beside the engines, in their own namespace
        {"namespaceSelector": _namespace(settings.monitoring_namespace)},
        *map(dict, settings.engine_clients),
    ]
    ingress = [{"from": callers, "ports": [{"port": PORT_NAME, "protocol": "TCP"}]}]
    egress: list[dict[str, Any]] = []  # else none: weights are there already
    model, tiers = deployment.model, deployment.engine.kv_tiers
    sources = []  # by scheme, and whether a Secret has the credentials
    if model.is_fetched and deployment.device != "sim":
        sources.append((model.scheme, bool(model.secret)))
    if tiers.shared_uri:
        sources.append(("s3", bool(tiers.shared_secret)))
    egress += _to_sources(sources)
    if deployment.prefill is not None:
        fetching = {"matchLabels": labels.engines(deployment.name)}
        serving = {"matchLabels": labels.engines(deployment.name, PREFILL_COMPONENT)}
        if deployment.flips:  # all do both in turn
            fetching = serving = {"matchLabels": labels.pods(deployment.name)}
        kv_port = [{"port": KV_PORT, "protocol": "TCP"}]
        ingress.append({"from": [{"podSelector": fetching}], "ports": kv_port})
        egress.append({"to": [{"podSelector": serving}], "ports": kv_port})
    spec: dict[str, Any] = {
        # All pods: none may be without a policy for as long as it outlives spec.prefill.
        "podSelector": {"matchLabels": labels.pods(deployment.name)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
    }
    if egress:
        spec["egress"] = egress
    return {**child(deployment, "networking.k8s.io/v1", "NetworkPolicy", name), "spec": spec}


def _to_sources(sources: Sequence[tuple[str, bool]]) -> list[dict[str, Any]]:
    """Names, and any host but the machines' own services: a policy knows no host names."""
    if not sources:
        return []
    dns = [{"port": port, "protocol": kind} for port in DNS_PORTS for kind in ("UDP", "TCP")]
    anywhere = [{"ipBlock": {"cidr": cidr, "except": but}} for cidr, but in NOT_ANYWHERE.items()]
    schemes = dict.fromkeys(scheme for scheme, has_secret in sources if not has_secret)
    identities = [each for scheme in schemes for each in IDENTITIES.get(scheme, ())]
    return [
        {"ports": dns},
        {"to": anywhere},
        *(
            {"to": [{"ipBlock": {"cidr": cidr}}], "ports": [{"port": port, "protocol": "TCP"}]}
            for cidr, port in identities
        ),
    ]


def _namespace(name: str) -> dict[str, Any]:
    return {"matchLabels": {NAMESPACE_NAME_LABEL: name}}
