"""`python -m charts.sources.rights HELM`: what each component's token may do, in docs/security.md.

Read from the Roles and bindings that the chart renders by default, so that the page cannot say less
than a token can do. HELM is the program (`python tests/tools/build.py` makes one).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charts.sources.kustomize import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PAGE = Path("docs/security.md")
BEGIN = "<!-- rights: made from the chart by `python -m charts.sources.rights` -->"
END = "<!-- end of rights -->"
_ALL = "all namespaces"


@dataclass(frozen=True, slots=True)
class Right:
    """One verb on one resource for a component's ServiceAccount."""

    component: str
    verb: str
    group: str
    resource: str  # with its subresource: pods/log
    namespace: str  # "": all
    name: str = ""  # "": all

    @property
    def full_resource(self) -> str:
        plural, slash, subresource = self.resource.partition("/")
        return f"{plural}{f'.{self.group}' if self.group else ''}{slash}{subresource}"


def rights(objects: Sequence[dict[str, Any]]) -> set[Right]:
    """Of all ServiceAccounts among the objects."""
    roles = {
        (body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"]): body
        for body in objects
        if body["kind"] in ("Role", "ClusterRole")
    }
    accounts = {
        (body["metadata"]["namespace"], body["metadata"]["name"]): body["metadata"]["labels"][
            "app.kubernetes.io/component"
        ]
        for body in objects
        if body["kind"] == "ServiceAccount"
    }
    found: set[Right] = set()
    for body in objects:
        if body["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        namespace = body["metadata"].get("namespace", "")
        reference = body["roleRef"]
        role = roles[reference["kind"], namespace, reference["name"]]
        for subject in body["subjects"]:
            component = accounts[subject["namespace"], subject["name"]]
            for rule in role["rules"]:
                found.update(_rights_of(rule, component, namespace))
    return found


def _rights_of(rule: dict[str, Any], component: str, namespace: str) -> Iterator[Right]:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                for name in rule.get("resourceNames", [""]):
                    yield Right(component, verb, group, resource, namespace, name)


def table(found: Iterable[Right]) -> str:
    """Resources with equal verbs in one row."""
    verbs: dict[tuple[str, str, str, str], list[str]] = {}
    for right in sorted(found, key=lambda right: right.verb):
        key = (right.component, right.namespace, right.full_resource, right.name)
        verbs.setdefault(key, []).append(right.verb)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (component, namespace, resource, name), may in sorted(verbs.items()):
        shown = f"`{resource}` named `{name}`" if name else f"`{resource}`"
        rows.setdefault((component, namespace, ", ".join(may)), []).append(shown)
    lines = ["| token of | may | where |", "|---|---|---|"]
    for (component, namespace, verbs_there), resources in rows.items():
        where = f"`{namespace}`" if namespace else _ALL
        lines.append(f"| {component} | {verbs_there}: {', '.join(resources)} | {where} |")
    lines.append("| engines, `helm test` | nothing: their pods have no token | - |")
    return "\n".join(lines)


def put_into(text: str, found: Iterable[Right]) -> str:
    """docs/security.md with its table renewed."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return f"{head}{BEGIN}\n\n{table(found)}\n\n{END}{tail}"


def main(helm: str) -> None:
    values = {"images": {"registry": "registry.example.com"}, "crds": {"install": False}}
    found = rights(render(helm, values))
    PAGE.write_text(put_into(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
