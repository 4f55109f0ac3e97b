"""`python -m charts.sources.kustomize HELM`: manifests/base is what the chart renders by default.

HELM is the program (`python tests/tools/build.py` makes one). The CRD, the namespace and the
operator's rights have sources of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable

BASE = Path("manifests/base")
MONITORING = Path("manifests/overlays/monitoring")
RELEASE, NAMESPACE = "octavo", "octavo-system"
# What differs from the chart's defaults: no hook pod, the CRD from crds/, and a registry that is
# nobody's: its name is reserved, so that nothing is ever pulled from it.
VALUES: dict[str, Any] = {
    "crds": {"install": False},
    "test": {"enabled": False},
    "images": {"registry": "registry.example.com"},
}
MONITORED: dict[str, Any] = {
    **VALUES, "monitoring": {"podMonitor": True}, "alerts": {"enabled": True},
}  # fmt: skip
_HELMS_OWN = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")
_HEAD = "# Made from charts/octavo by `python -m charts.sources.kustomize`.\n"
_FILES = {"operator": "operator.yaml", "router": "router.yaml", "rbac": "access.yaml"}


def base_files(objects: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The files of manifests/base, from the chart's objects."""
    files: dict[str, list[dict[str, Any]]] = {}
    for body in objects:
        component = body["metadata"]["labels"]["app.kubernetes.io/component"]
        if component == "operator" and _is_right(body):
            continue  # operator-rbac.yaml has them, from the same table
        files.setdefault(_FILES[component], []).append(body)
    return {name: _text(bodies) for name, bodies in sorted(files.items())}


def monitoring_files(objects: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The files of manifests/overlays/monitoring: what `MONITORED` adds."""
    kinds = {"PodMonitor": "monitors.yaml", "PrometheusRule": "rules.yaml"}
    files: dict[str, list[dict[str, Any]]] = {}
    for body in objects:
        if name := kinds.get(body["kind"]):
            files.setdefault(name, []).append(body)
    return {name: _text(bodies) for name, bodies in sorted(files.items())}


def _is_right(body: dict[str, Any]) -> bool:
    return body["kind"] == "ServiceAccount" or "rbac." in body["apiVersion"]


def _text(bodies: list[dict[str, Any]]) -> str:
    for body in bodies:
        labels = body["metadata"]["labels"]
        for key in _HELMS_OWN:
            labels.pop(key, None)
    bodies = sorted(bodies, key=lambda body: (body["kind"], body["metadata"]["name"]))
    return _HEAD + yaml.dump_all(bodies, Dumper=_PlainDumper, sort_keys=False, width=120)


class _PlainDumper(yaml.SafeDumper):
    """Each value where it belongs; texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_PlainDumper.add_representer(str, _represent_text)


def render(helm: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The chart's objects for these values."""
    command = [
        helm,
        "template",
        RELEASE,
        "charts/octavo",
        "--namespace",
        NAMESPACE,
        "--values",
        "-",
    ]
    done = subprocess.run(
        command, input=yaml.safe_dump(values), capture_output=True, text=True, check=True
    )
    return [body for body in yaml.safe_load_all(done.stdout) if body]


def main(helm: str) -> None:
    for folder, files in (
        (BASE, base_files(render(helm, VALUES))),
        (MONITORING, monitoring_files(render(helm, MONITORED))),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
