"""`python -m octavo_operator.manifests` in a checkout: what manifests/base takes from the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from octavo_operator.cluster import rbac
from octavo_operator.process import LEASE_NAME

RBAC = Path("manifests/base/operator-rbac.yaml")
NAMESPACE = "octavo-system"
ACCOUNT = "octavo-operator"
LABELS = {
    "app.kubernetes.io/name": "octavo-operator",
    "app.kubernetes.io/part-of": "octavo",
    "app.kubernetes.io/component": "operator",
}
_HEAD = """\
# Made from rbac.py by `python -m octavo_operator.manifests`; each right has its reason there.
"""


def rbac_objects() -> list[dict[str, Any]]:
    """For an operator that serves all namespaces, with the routers in its own."""
    metadata = {"name": ACCOUNT, "namespace": NAMESPACE, "labels": LABELS}
    own = (*rbac.leading(LEASE_NAME, ACCOUNT), *rbac.ROUTERS)
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        rbac.role(ACCOUNT, rbac.SERVED, labels=LABELS),
        _binding("ClusterRoleBinding", {"name": ACCOUNT, "labels": LABELS}, "ClusterRole"),
        rbac.role(ACCOUNT, own, namespace=NAMESPACE, labels=LABELS),
        _binding("RoleBinding", metadata, "Role"),
    ]


def render(objects: list[dict[str, Any]]) -> str:
    return _HEAD + yaml.dump_all(objects, Dumper=_PlainDumper, sort_keys=False, width=100)


def main() -> None:
    RBAC.write_text(render(rbac_objects()), encoding="utf-8")


def _binding(kind: str, metadata: dict[str, Any], role_kind: str) -> dict[str, Any]:
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": group, "kind": role_kind, "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    }


class _PlainDumper(yaml.SafeDumper):
    """Each value where it belongs, however often it occurs."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    main()
