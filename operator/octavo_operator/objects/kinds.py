"""The kinds of objects that the operator reads and writes, and where the API serves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol import kubernetes as k

if TYPE_CHECKING:
    from collections.abc import Mapping

# Kubernetes objects have no useful static type; they are dicts shaped as the YAML a user knows.
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    group: str
    version: str
    plural: str
    name: str
    is_optional: bool = False  # not every cluster has it

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def capability(self) -> str:
        """How Settings.capabilities names it."""
        return f"{self.api_version}/{self.name}"

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


LLM_DEPLOYMENT = Kind(k.GROUP, k.VERSION, k.PLURAL, k.KIND)
LLM_ADAPTER = Kind(k.GROUP, k.VERSION, k.ADAPTER_PLURAL, k.ADAPTER_KIND)
DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
SERVICE = Kind("", "v1", "services", "Service")
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
VOLUME_CLAIM = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
POD = Kind("", "v1", "pods", "Pod")
EVENT = Kind("", "v1", "events", "Event")
LEASE = Kind("coordination.k8s.io", "v1", "leases", "Lease")
DISRUPTION_BUDGET = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
POD_AUTOSCALER = Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
POD_MONITOR = Kind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor", is_optional=True)
SERVICE_MONITOR = Kind(
    "monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor", is_optional=True
)
SCALED_OBJECT = Kind("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject", is_optional=True)

# what desired objects may be
OWNED = (
    SERVICE_ACCOUNT,
    CONFIG_MAP,
    VOLUME_CLAIM,
    SERVICE,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
    DEPLOYMENT,
    POD_AUTOSCALER,
    POD_MONITOR,
    SERVICE_MONITOR,
    SCALED_OBJECT,
)
ALL = (LLM_DEPLOYMENT, LLM_ADAPTER, *OWNED, POD, EVENT, LEASE)
_BY_NAME = {(kind.api_version, kind.name): kind for kind in ALL}


def kind_of(body: Mapping[str, Any]) -> Kind:
    """The kind of an object that carries apiVersion and kind."""
    return _BY_NAME[(str(body["apiVersion"]), str(body["kind"]))]


def uid_of(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("uid", ""))


def name_of(body: Mapping[str, Any]) -> str:
    return str(body["metadata"]["name"])


def namespace_of(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("namespace", ""))


def labels_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    return body["metadata"].get("labels") or {}


def annotations_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    return body["metadata"].get("annotations") or {}


def owner_uids(body: Mapping[str, Any]) -> list[str]:
    return [str(owner["uid"]) for owner in body["metadata"].get("ownerReferences") or []]


def controller_uid(body: Mapping[str, Any]) -> str:
    for owner in body["metadata"].get("ownerReferences") or []:
        if owner.get("controller"):
            return str(owner["uid"])
    return ""
