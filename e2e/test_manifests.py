"""manifests/ on a real cluster: from its two commands to an answer, with only what is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from e2e.chat import chat
from e2e.cluster import cache, images

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.cluster.choose import Cluster
    from e2e.kubectl import Kubectl

SYSTEM = "octavo-system"
SAMPLE = cache.ROOT / "manifests" / "samples" / "minimal.yaml"


@pytest.fixture(scope="module")
def platform(kubectl: Kubectl) -> Iterator[Kubectl]:
    """Operator and routers of manifests/base with the images of this run."""
    base = kubectl("kustomize", str(cache.ROOT / "manifests" / "base"))
    objects = [with_our_images(body) for body in yaml.safe_load_all(base)]
    kubectl.apply(*objects)
    try:
        yield kubectl
    finally:
        kubectl("delete", "--ignore-not-found", "--filename", str(SAMPLE))
        text = yaml.safe_dump_all(objects)
        kubectl("delete", "--ignore-not-found", "--wait=true", "--filename=-", text=text)


def test_the_smallest_sample_becomes_ready_and_answers(platform: Kubectl, node: Cluster) -> None:
    platform("apply", "--filename", str(SAMPLE))
    platform.wait("llmdeployment/smollm2", "condition=Ready", timeout_s=90)
    service = platform.get("service", "octavo-router", "--namespace", SYSTEM)
    assert "Paris" in chat(f"http://{service['spec']['clusterIP']}:8080")


def test_no_pod_restarted(platform: Kubectl) -> None:
    path = "jsonpath={range .items[*]}{.status.containerStatuses[*].restartCount} {end}"
    restarts = platform("get", "pods", "--namespace", SYSTEM, "--output", path).split()
    assert restarts == ["0"] * 4


def with_our_images(body: dict[str, Any]) -> dict[str, Any]:
    if body["kind"] == "Deployment":
        (container,) = body["spec"]["template"]["spec"]["containers"]
        container["image"] = images.reference(container["name"])
        container["resources"]["requests"]["cpu"] = "50m"  # the node is small
        if container["name"] == "operator":
            container["args"].append(f"--cpu-image={images.reference('engine-cpu')}")
    return body
