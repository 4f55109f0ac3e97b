"""The chart on the cluster of the tests: installed, changed, removed, and what is there besides."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING

from e2e.cluster import cache, images
from tests.tools.build import tool

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.choose import Cluster
    from e2e.kubectl import Kubectl

CHART = cache.ROOT / "charts" / "octavo"
NAMESPACE = "octavo-system"
RELEASE = "octavo"
CRD = "llmdeployments.octavo.dev"
# Where the images of this run are; nothing is pulled that has their names.
OUR_IMAGES = ("images.registry=docker.io", f"images.tag={images.TAG}")
# The node is small, and tests must not wait for streams that are not read.
SMALL_NODE = (
    "router.resources.requests.cpu=20m",
    "operator.resources.requests.cpu=20m",
    "router.drainSeconds=20",
)
TIMEOUT = "180s"
# What Kubernetes itself puts into each namespace.
_IN_EACH = {f"ConfigMap/{NAMESPACE}/kube-root-ca.crt", f"ServiceAccount/{NAMESPACE}/default"}
# Kubernetes' own, which come and go by themselves.
_PASSING = ("events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io")


class Helm:
    """Calls helm where the cluster can be reached, with this chart in its usual namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __call__(self, *words: str) -> str:
        """Its output. Raises AssertionError with its message."""
        command = self._cluster.command([tool("helm"), f"--namespace={NAMESPACE}", *words])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout

    def upgrade(self, *values: str) -> None:
        """Installs it where it is not there. Returns when all of its pods are ready."""
        settings = [f"--set={value}" for value in (*OUR_IMAGES, *SMALL_NODE, *values)]
        wait = ["--create-namespace", "--wait", f"--timeout={TIMEOUT}"]
        self("upgrade", "--install", RELEASE, str(CHART), *wait, *settings)


def inventory(kubectl: Kubectl) -> set[str]:
    """Every object of the cluster, as kind/namespace/name."""
    kinds = kubectl("api-resources", "--verbs=list", "--output=name").split()
    wanted = ",".join(kind for kind in kinds if kind not in _PASSING)
    line = "{.kind}/{.metadata.namespace}/{.metadata.name}"
    path = f"jsonpath={{range .items[*]}}{line}{{'\\n'}}{{end}}"
    return set(kubectl("get", wanted, "--all-namespaces", "--output", path).splitlines())


def left_behind(kubectl: Kubectl) -> set[str]:
    """Of ours, in the chart's namespace."""
    return {each for each in inventory(kubectl) if f"/{NAMESPACE}/" in each} - _IN_EACH


def fenced(page: Path, before: str) -> list[str]:
    """The commands of the first shell block after the line that has these words."""
    text = page.read_text()
    assert before in text, f"{page.name} has no {before!r}"
    block = text.partition(before)[2].partition("```sh\n")[2].partition("```")[0]
    lines = block.replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, posix=False)) for line in lines if line.strip()]
