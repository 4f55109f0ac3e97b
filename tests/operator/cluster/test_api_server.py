"""The API server that cluster tests run against: real, strict, and absent only for a reason."""

from __future__ import annotations

import shutil
import socket
from typing import TYPE_CHECKING

import pytest

from tests.apiserver import build
from tests.fakes import apiserver
from tests.fakes.apiserver import ApiError
from tests.fakes.deployments import make_body

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.apiserver import ApiServer


def test_without_go_or_binaries_there_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setattr(build, "_go", lambda: None)
    assert build.why_not() == build.MISSING
    monkeypatch.setenv("KUBEBUILDER_ASSETS", "/assets")
    assert build.why_not() == ""
    assert build.commands() == (["/assets/etcd"], ["/assets/kube-apiserver"])


def test_other_sources_are_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module, key = build.MODULE, build._key()
    for name in ("go.mod", "go.sum", "apiserver/main.go"):
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(module, copy)
        monkeypatch.setattr(build, "MODULE", copy)
        monkeypatch.setattr(build, "SOURCE", copy / "apiserver")
        assert build._key() == key
        (copy / name).write_text("package main")
        assert build._key() != key


@pytest.mark.cluster
def test_unknown_fields_are_errors(apiserver: ApiServer, namespace: str):
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": namespace},
        "date": {},
    }
    with pytest.raises(ApiError, match='unknown field "date"'):
        apiserver.create(body)


@pytest.mark.cluster
def test_the_user_has_no_rights_until_a_test_gives_some(apiserver: ApiServer, namespace: str):
    path = f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments"
    with pytest.raises(ApiError, match=r'User "octavo-operator" cannot list') as refused:
        apiserver.request("GET", path, token=apiserver.user_token)
    assert refused.value.status == 403


@pytest.mark.cluster
def test_objects_come_and_go(apiserver: ApiServer, namespace: str):
    body = make_body()
    body["metadata"] = {"name": "a", "namespace": namespace}
    stored = apiserver.create(body)
    found = apiserver.list("octavo.dev/v1alpha1", "LLMDeployment", namespace)
    assert [item["metadata"]["uid"] for item in found] == [stored["metadata"]["uid"]]
    apiserver.delete(stored)
    assert apiserver.list("octavo.dev/v1alpha1", "LLMDeployment", namespace) == []


@pytest.mark.cluster
@pytest.mark.slow
def test_a_port_that_was_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    free_ports = apiserver._free_ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        attempts = iter([[taken.getsockname()[1], *free_ports(2)], free_ports(3)])
        monkeypatch.setattr(apiserver, "_free_ports", lambda count: next(attempts))
        with apiserver.ApiServer.start() as server:
            assert server.request("GET", "/version")["major"] == "1"
    assert next(attempts, None) is None
