"""manifests/base: what it takes from the code is current, and an API server takes all of it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, ROUTER_COMPONENT
from octavo_operator import manifests
from octavo_operator.cli import PREFIX, add_options, read_values
from octavo_router.config.load import all_flags
from tests.fakes.quick_yaml import one_line, read_all_yaml, read_yaml

if TYPE_CHECKING:
    from tests.fakes.apiserver import ApiServer

ROOT = Path(__file__).parents[2]
BASE = ROOT / "manifests" / "base"
LAST_APPLIED_LIMIT = 262_144  # of all annotations together: `kubectl apply` keeps a copy in one


def resources(folder: Path = BASE) -> list[dict[str, Any]]:
    """As kustomize reads them, in its file's order."""
    found: list[dict[str, Any]] = []
    for entry in read_yaml((folder / "kustomization.yaml").read_text())["resources"]:
        path = folder / entry
        found += resources(path) if path.is_dir() else read_all_yaml(path.read_text())
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = (
        body["spec"]["template"]["spec"]["containers"][0]
        for body in resources()
        if body["kind"] == "Deployment" and body["metadata"]["name"] == name
    )
    return dict(found)


def test_the_rights_are_those_of_the_table():
    text = (ROOT / manifests.RBAC).read_text(encoding="utf-8")
    is_current = text == manifests.render(manifests.rbac_objects())
    assert is_current, f"{manifests.RBAC} is old: run python -m octavo_operator.manifests"


def test_the_operator_knows_its_flags_and_variables():
    parser = argparse.ArgumentParser()
    add_options(parser)
    found = container("octavo-operator")
    args = parser.parse_args(found["args"])
    variables = {variable["name"]: "x" for variable in found["env"]}
    assert all(name.startswith(PREFIX) for name in variables)
    values = read_values(args, variables)
    assert values["router-namespace"] == "octavo-system"
    assert found["ports"][0]["containerPort"] == int(values["port"])


def test_the_router_knows_its_flags_and_variables():
    found = container("octavo-router")
    flags = {flag.name: flag.variable for flag in all_flags()}
    assert {arg.removeprefix("--").partition("=")[0] for arg in found["args"]} <= {*flags, "config"}
    assert {variable["name"] for variable in found["env"]} <= set(flags.values())


def test_the_operator_finds_the_routers_and_the_service_finds_them_too():
    bodies = {(body["kind"], body["metadata"]["name"]): body for body in resources()}
    labels = bodies["Deployment", "octavo-router"]["spec"]["template"]["metadata"]["labels"]
    assert labels[COMPONENT_LABEL] == ROUTER_COMPONENT
    selector = bodies["Service", "octavo-router"]["spec"]["selector"]
    assert selector.items() <= labels.items()


def test_a_plain_kubectl_apply_can_keep_its_copy_of_the_crd():
    for body in resources():
        assert len(one_line(body)) < LAST_APPLIED_LIMIT


@pytest.mark.cluster
def test_an_api_server_takes_all_of_it(apiserver: ApiServer):
    """In a namespace that enforces the restricted pod security level, without a warning."""
    bodies = resources()
    (namespace,) = (body for body in bodies if body["kind"] == "Namespace")
    apiserver.apply(namespace)
    apiserver.warnings.clear()
    for body in bodies:
        apiserver.apply(body, dry_run=True)
    assert apiserver.warnings == []


@pytest.mark.slow
def test_kustomize_builds_it():
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed; its resources are read by the tests above")
    built = subprocess.run(
        ["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, check=True
    )
    bodies = read_all_yaml(built.stdout)
    names = {(body["kind"], body["metadata"]["name"]) for body in bodies}
    assert names == {(body["kind"], body["metadata"]["name"]) for body in resources()}
    images = {
        each["image"]
        for body in bodies
        if body["kind"] == "Deployment"
        for each in body["spec"]["template"]["spec"]["containers"]
    }
    assert images == {
        f"registry.example.com/octavo/{name}:0.1.0" for name in ("operator", "router")
    }
