"""One cluster for all tests, with Octavo's images in it: KEEP_CLUSTER=1 leaves it up afterwards.

Stories share one installation of the chart, and have a namespace each.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from e2e import artifacts
from e2e.cluster import images
from e2e.cluster.choose import Cluster, cluster
from e2e.helm import NAMESPACE, RELEASE, Helm
from e2e.kubectl import Kubectl

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

# Those that want the cluster for themselves come before the shared installation, its end last.
FIRST = (
    "test_bare_machine.py",
    "test_images.py",
    "test_cluster.py",
    "test_manifests.py",
    "test_newcomer.py",
)
LAST = ("test_upgrade.py", "test_secrets.py", "test_production.py")


@dataclass(frozen=True, slots=True)
class Platform:
    """The chart, installed: every namespace's LLMDeployments are served."""

    helm: Helm
    kubectl: Kubectl
    node: Cluster

    @property
    def base_url(self) -> str:
        service = self.kubectl.get("service", f"{RELEASE}-router", f"--namespace={NAMESPACE}")
        return f"http://{service['spec']['clusterIP']}:8080/v1"

    def pods(self, component: str) -> list[str]:
        """Names of those that are ready."""
        selector = f"--selector=app.kubernetes.io/component={component}"
        path = (
            "jsonpath={range .items[*]}{.metadata.name} "
            "{.status.conditions[?(@.type=='Ready')].status} "
            "{.metadata.deletionTimestamp}{'\\n'}{end}"
        )
        words = ("get", "pods", f"--namespace={NAMESPACE}", selector, "--output", path)
        lines = [line.split() for line in self.kubectl(*words).splitlines()]
        return [line[0] for line in lines if line[1:] == ["True"]]

    def kill(self, namespace: str, pod: str) -> None:
        """SIGKILL, without notice."""
        path = "jsonpath={.status.containerStatuses[0].containerID}"
        words = ("get", "pod", pod, f"--namespace={namespace}", "--output", path)
        self.node.kill(self.kubectl(*words).removeprefix("containerd://"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rolling-minutes", type=float, default=0.0, metavar="M",
        help="for how long test_rolling.py replaces everything; default: one round",
    )  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.name
        if name in FIRST:
            return FIRST.index(name) - len(FIRST)
        return LAST.index(name) + 1 if name in LAST else 0

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """A first build takes many minutes: here it counts against no test's time limit."""
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if session.config.option.collectonly:
        return
    if fixtures & {"node", "image", "alone"}:
        # Later there is only the cluster's network, in which no packages are to be had.
        marks = (mark for item in session.items for mark in item.iter_markers("image"))
        cluster().build([*images.NAMES, *(name for mark in marks for name in mark.args)])
    elif "bundle" in fixtures:
        cluster().archives(images.NAMES)


@pytest.fixture(scope="session")
def node() -> Iterator[Cluster]:
    """The cluster itself. This process has its network from here on, and no other."""
    chosen = cluster()
    was_up = chosen.is_up()
    if not was_up:
        chosen.start()
    try:
        chosen.load(images.NAMES)
        chosen.enter()
        yield chosen
    finally:
        if not was_up and not os.environ.get("KEEP_CLUSTER"):
            chosen.stop()


@pytest.fixture(scope="session")
def kubectl(node: Cluster) -> Kubectl:
    return Kubectl(node)


@pytest.fixture(scope="session")
def platform(node: Cluster, kubectl: Kubectl) -> Platform:
    helm = Helm(node)
    helm.upgrade()
    return Platform(helm, kubectl, node)


@pytest.fixture
def space(kubectl: Kubectl) -> Iterator[Kubectl]:
    """A namespace for one test."""
    with kubectl.own_namespace("test") as inside:
        yield inside


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    kubectl = getattr(item, "funcargs", {}).get("kubectl")
    if report.failed and isinstance(kubectl, Kubectl):
        place: Path = artifacts.dump(kubectl, f"{item.name}.{report.when}")
        print(f"What the cluster knew is in {place}", file=sys.stderr)
    return report
