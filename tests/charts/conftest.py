"""A process that renders the chart, and a real API server that judges what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.apiserver import build as apiserver_build
from tests.tools import build as tools_build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.apiserver import ApiServer
    from tests.fakes.chart import Chart

STAND_INS = Path(__file__).parent / "stand_ins"
RESTRICTED = {
    f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """First builds take minutes: here they count against no test's time limit."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "apiserver" in wanted and not apiserver_build.why_not():
        apiserver_build.commands()
    if {"chart", "helm"} & wanted and not tools_build.why_not():
        tools_build.tool("helm")


@pytest.fixture(scope="session")
def helm() -> str:
    """The path of helm."""
    if reason := tools_build.why_not():
        pytest.skip(reason)
    return tools_build.tool("helm")


@pytest.fixture(scope="session")
def chart(helm: str) -> Iterator[Chart]:
    """Renders charts/octavo."""
    from tests.fakes.chart import Chart

    with Chart() as rendering:
        yield rendering


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A running kube-apiserver with our CRD, stand-ins for the kinds of others, and a namespace
    that enforces the restricted Pod Security level."""
    if reason := apiserver_build.why_not():
        pytest.skip(reason)
    from tests.fakes.apiserver import CRD_FILE, ApiServer

    with ApiServer.start() as server:
        files = [CRD_FILE, *sorted(STAND_INS.glob("*.yaml"))]
        for file in files:  # all at once, then wait for each
            server.apply(yaml.load(file.read_text(), yaml.CSafeLoader), manager="install")
        for file in files:
            server.install(file)
        metadata = {"name": "octavo-system", "labels": RESTRICTED}
        server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        for name in ("team-a", "team-b", "monitoring"):
            server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield server


@pytest.fixture(scope="session")
def defaults() -> dict[str, object]:
    """values.yaml."""
    from tests.fakes.chart import CHART

    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))
