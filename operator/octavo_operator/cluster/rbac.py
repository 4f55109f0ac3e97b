"""What the operator may do, and which module needs it: the table behind every Role of ours.

manifests and chart render from it; a test compares it with the calls that the code makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_operator.objects.kinds import Kind

READ = ("list", "watch")
# Before a write: what is there already. patch is server-side apply of what exists, create of what
# does not.
WRITE = ("get", "create", "patch")


@dataclass(frozen=True, slots=True)
class Rule:
    kind: Kind
    verbs: tuple[str, ...]
    module: str  # who needs it
    subresource: str = ""
    names: tuple[str, ...] = ()  # of the objects; empty: all

    @property
    def resource(self) -> str:
        plural = self.kind.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural


def _owned(kind: Kind) -> Rule:
    """NOTE: a kind that not every cluster has is never watched, and claims are never deleted: data
    is the user's."""
    reads = ("list",) if kind.is_optional else READ
    deletes = () if kind == kinds.VOLUME_CLAIM else ("delete",)
    return Rule(kind, (*reads, *WRITE, *deletes), "intake, execute")


# In each namespace that is served.
SERVED = (
    Rule(kinds.LLM_DEPLOYMENT, (*READ, "get"), "intake, handlers, reconcile"),
    Rule(kinds.LLM_DEPLOYMENT, ("patch",), "reporting", subresource="status"),
    Rule(kinds.LLM_ADAPTER, READ, "intake, handlers, reconcile"),
    Rule(kinds.LLM_ADAPTER, ("patch",), "reporting", subresource="status"),
    # Owner references that block deletion need this right where the API server checks it.
    Rule(kinds.LLM_DEPLOYMENT, ("update",), "execute", subresource="finalizers"),
    *(_owned(kind) for kind in kinds.OWNED),
    Rule(kinds.POD, (*READ, "patch"), "intake, execute"),
    Rule(kinds.POD, ("patch",), "execute", subresource="status"),
    # The progress of a fetch. Without it the status shows the phase alone.
    Rule(kinds.POD, ("get",), "loading", subresource="log"),
    Rule(kinds.EVENT, ("create", "list"), "events, reporting"),
)


def leading(lease_name: str, deployment: str = "") -> tuple[Rule, ...]:
    """In the operator's own namespace; `deployment` is the operator's."""
    owner = (Rule(kinds.DEPLOYMENT, ("get",), "leader", names=(deployment,)),)
    return (
        *(owner if deployment else ()),
        Rule(kinds.LEASE, ("create",), "leader"),  # a name cannot be demanded of what is not there
        Rule(kinds.LEASE, ("get", "update"), "leader", names=(lease_name,)),
    )


# In the namespace of the routers.
ROUTERS = (Rule(kinds.POD, ("list",), "routers"),)


def render_rules(rules: Iterable[Rule]) -> list[dict[str, Any]]:
    """As `rules` of a Role or ClusterRole; resources of one group with equal verbs together."""
    merged: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for rule in rules:
        resources = merged.setdefault((rule.kind.group, rule.verbs, rule.names), [])
        if rule.resource not in resources:
            resources.append(rule.resource)
    rendered = []
    for (group, verbs, names), resources in merged.items():
        entry: dict[str, Any] = {"apiGroups": [group], "resources": resources, "verbs": [*verbs]}
        if names:
            entry["resourceNames"] = [*names]
        rendered.append(entry)
    return rendered


def role(
    name: str,
    rules: Iterable[Rule],
    *,
    namespace: str = "",
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A Role in `namespace`, or a ClusterRole without one."""
    metadata: dict[str, Any] = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    if labels:
        metadata["labels"] = labels
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role" if namespace else "ClusterRole",
        "metadata": metadata,
        "rules": render_rules(rules),
    }
