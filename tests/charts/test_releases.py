"""Helm itself, on a real API server: install, upgrade, uninstall, and install again."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.charts.combinations import KEYS
from tests.fakes.apiserver import ApiError
from tests.fakes.chart import CHART, REGISTRY, laid_over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster
NAMESPACE = "released"
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "llmdeployments.octavo.dev"},
}


class Helm:
    def __init__(self, program: str, server: ApiServer, home: str) -> None:
        self._program, self._server = program, server
        self._env = {**os.environ, "HELM_CACHE_HOME": home, "HELM_CONFIG_HOME": home,
                     "HELM_DATA_HOME": home, "KUBECONFIG": str(server.kubeconfig)}  # fmt: skip

    def __call__(self, *args: str, values: Mapping[str, Any] | None = None) -> str:
        given = ["--values", "-"] if values is not None else []
        done = subprocess.run(
            [self._program, *args, "--namespace", NAMESPACE, *given],
            input=json.dumps(laid_over(REGISTRY, values or {})), env=self._env,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


def _object(api_version: str, kind: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def test_a_release_from_its_install_to_its_return(
    apiserver: ApiServer, helm: str, tmp_path_factory: pytest.TempPathFactory
):
    """The CRD is taken over from kubectl, kept over the uninstall, and found by the next install;
    the token that was made once stays the same over upgrades."""
    run = Helm(helm, apiserver, str(tmp_path_factory.mktemp("helm")))
    install = ("upgrade", "--install", "octavo", str(CHART), "--create-namespace")
    notes = run(*install, "--take-ownership", values=KEYS)
    assert f"kubectl apply -n {NAMESPACE}" in notes
    token = apiserver.get(_object("v1", "Secret", "octavo-router-state"))["data"]["token"]
    crd = apiserver.get(CRD)
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert crd["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"

    apiserver.patch(CRD, {"metadata": {"labels": {"seen": "yes"}}})
    more = laid_over(KEYS, {"operator": {"watchNamespaces": ["team-a"]}, "router": {"replicas": 3}})
    run(*install, values=more)
    assert apiserver.get(_object("v1", "Secret", "octavo-router-state"))["data"]["token"] == token
    router = apiserver.get(_object("apps/v1", "Deployment", "octavo-router"))
    assert router["spec"]["replicas"] == 3
    with pytest.raises(ApiError, match="not found"):  # no right that is not needed any more stays
        apiserver.get({**_object("rbac.authorization.k8s.io/v1", "ClusterRole", "octavo-operator")})

    run("uninstall", "octavo")
    for api_version, kind, name in (
        ("apps/v1", "Deployment", "octavo-router"), ("apps/v1", "Deployment", "octavo-operator"),
        ("v1", "Secret", "octavo-router-state"), ("v1", "Service", "octavo-router"),
        ("v1", "ConfigMap", "octavo-router"), ("v1", "ServiceAccount", "octavo-operator"),
    ):  # fmt: skip
        assert _is_going(apiserver, _object(api_version, kind, name)), (kind, name)
    assert apiserver.get(CRD)["metadata"]["labels"]["seen"] == "yes"  # the same one

    run(*install, values={})
    assert apiserver.get(_object("v1", "Service", "octavo-router"))
    run("uninstall", "octavo")


def _is_going(server: ApiServer, body: dict[str, Any]) -> bool:
    """Gone, or about to: nobody collects garbage here."""
    try:
        return "deletionTimestamp" in server.get(body)["metadata"]
    except ApiError as error:
        return error.status == 404
