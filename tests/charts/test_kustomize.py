"""manifests/ is the chart without Helm: made from it, and equal to it when built."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from charts.sources import kustomize
from tests.fakes.chart import Chart, laid_over

if TYPE_CHECKING:
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted((ROOT / "manifests" / "overlays").iterdir())
Object = dict[str, Any]
_POD_SAYS_IT = "automountServiceAccountToken"  # of a ServiceAccount


@pytest.fixture(scope="session")
def built(helm: str) -> dict[str, list[Object]]:
    """What kustomize makes of the base and of each overlay."""
    program = Path(helm).with_name("kustomize")
    folders = [ROOT / "manifests" / "base", *OVERLAYS]
    return {folder.name: _build(program, folder) for folder in folders}


def _build(program: Path, folder: Path) -> list[Object]:
    done = subprocess.run([program, "build", folder], capture_output=True, text=True, check=True)
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def by_key(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """Without what each tool writes of itself, and without the labels of rights."""
    found = {}
    for body in objects:
        metadata = {k: v for k, v in body["metadata"].items() if v and k != "annotations"}
        labels = metadata.pop("labels", {})
        if "rbac" not in body["apiVersion"] and body["kind"] != "ServiceAccount":
            metadata["labels"] = {k: v for k, v in labels.items() if k not in kustomize._HELMS_OWN}
        kept = {key: value for key, value in body.items() if key != _POD_SAYS_IT}
        found[body["kind"], metadata["name"]] = {**kept, "metadata": metadata}
    return found


NOT_COMPARED = {("Namespace", "octavo-system"),
                ("CustomResourceDefinition", "llmdeployments.octavo.dev"),
                ("CustomResourceDefinition", "llmadapters.octavo.dev")}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("base", kustomize.VALUES),
        ("monitoring", laid_over(kustomize.MONITORED, {"dashboards": {"enabled": True}})),
    ],
)
def test_it_is_what_the_chart_renders(
    chart: Chart, built: dict[str, list[Object]], name: str, values: Object
):
    theirs, ours = by_key(chart.objects(values)), by_key(built[name])
    assert theirs.keys() == ours.keys() - NOT_COMPARED
    for key, body in theirs.items():
        assert body == ours[key], key


def test_the_files_made_from_the_chart_are_current(chart: Chart):
    made = kustomize.base_files(chart.objects(kustomize.VALUES))
    monitoring = kustomize.monitoring_files(chart.objects(kustomize.MONITORED))
    for folder, files in ((kustomize.BASE, made), (kustomize.MONITORING, monitoring)):
        for name, text in files.items():
            is_current = (ROOT / folder / name).read_text() == text
            assert is_current, f"{folder / name} is old: run python -m charts.sources.kustomize"


def test_air_gapped_names_no_other_registry(built: dict[str, list[Object]]):
    found = by_key(built["air-gapped"])
    operator = found["Deployment", "octavo-operator"]["spec"]["template"]["spec"]
    router = found["Deployment", "octavo-router"]["spec"]["template"]["spec"]
    args = operator["containers"][0]["args"]
    images = [operator["containers"][0]["image"], router["containers"][0]["image"],
              *(arg.partition("=")[2] for arg in args if "-image=" in arg)]  # fmt: skip
    assert images == [
        f"registry.local:5000/octavo/{name}:0.1.0"
        for name in ("operator", "router", "engine-cpu", "engine-cuda")
    ]
    assert operator["imagePullSecrets"] == router["imagePullSecrets"] == [{"name": "registry"}]
    env = {v["name"]: v.get("value") for v in operator["containers"][0]["env"]}
    assert env["OCTAVO_OPERATOR_IMAGE_PULL_SECRETS"] == "registry"
    plain = by_key(built["base"])["Deployment", "octavo-operator"]["spec"]["template"]["spec"]
    assert len(args) == len(plain["containers"][0]["args"])


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["base", *(overlay.name for overlay in OVERLAYS)])
def test_an_api_server_takes_all_of_it(
    apiserver: ApiServer, built: dict[str, list[Object]], name: str
):
    apiserver.warnings.clear()
    for body in built[name]:
        if body["kind"] != "CustomResourceDefinition":
            apiserver.apply(body, dry_run=True)
    assert apiserver.warnings == []
