"""A kubeconfig whose user logs in by a program, as those of managed clusters do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.cluster.kube_config import KubeConfig, from_kubeconfig
from octavo_operator.errors import SettingsInvalid

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "client.authentication.k8s.io/v1"


def config_of(folder: Path, script: str, **spec: Any) -> KubeConfig:
    program = folder / "login"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    spec = {"apiVersion": VERSION, "command": "./login", **spec}
    content = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://x"}}],
        "users": [{"name": "u", "user": {"exec": spec}}],
    }
    return from_kubeconfig(content, folder=folder)


def credential(expires_at: str = "") -> str:
    """Prints another token each time."""
    expires = f', "expirationTimestamp": "{expires_at}"' if expires_at else ""
    return (
        'echo x >> asked; n=$(wc -l < asked | tr -d " "); '
        f'echo \'{{"status": {{"token": "t\'$n\'"{expires}}}}}\''
    )


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_its_token_is_kept_while_it_is_good(tmp_path: Path):
    config = config_of(tmp_path, credential("2999-01-01T00:00:00Z"))
    assert config.has_passing_token
    assert [config.read_token() for _ in range(3)] == ["t1"] * 3
    assert config.read_token(renew=True) == "t2", "the API server has refused the first"


def test_a_token_that_expires_is_asked_for_anew(tmp_path: Path):
    config = config_of(tmp_path, credential("2020-01-01T00:00:00Z"))
    assert [config.read_token() for _ in range(2)] == ["t1", "t2"]


def test_the_program_gets_what_the_kubeconfig_says(tmp_path: Path):
    script = 'echo "$KUBERNETES_EXEC_INFO" > info; echo "$1 $A" > given; ' + credential()
    config = config_of(
        tmp_path, script, args=["get-token"], env=[{"name": "A", "value": "b"}],
        provideClusterInfo=True,
    )  # fmt: skip
    assert config.read_token() == "t1"
    assert (tmp_path / "given").read_text() == "get-token b\n"
    info = json.loads((tmp_path / "info").read_text())
    assert (info["apiVersion"], info["kind"]) == (VERSION, "ExecCredential")
    assert info["spec"] == {"interactive": False, "cluster": {"server": "https://x"}}


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo expired session >&2; exit 3", "ended with 3: expired session"),
        ("echo hello", "printed no ExecCredential with a token"),
        ("printf '[%.0s' $(seq 3000)", "printed no ExecCredential with a token"),
        ('echo \'{"status": {"clientCertificateData": "x"}}\'', "certificates by a program"),
    ],
)
def test_what_goes_wrong_is_said(tmp_path: Path, script: str, problem: str):
    with pytest.raises(SettingsInvalid, match=problem):
        config_of(tmp_path, script).read_token()


def test_a_program_that_is_not_there_is_named_with_its_hint(tmp_path: Path):
    config = config_of(tmp_path, "", command="no-such-login", installHint="install it")
    with pytest.raises(SettingsInvalid, match="no-such-login, which is not installed: install it"):
        config.read_token()
