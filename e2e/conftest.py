"""One cluster for all tests, with Octavo's images in it: KEEP_CLUSTER=1 leaves it up afterwards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from e2e.cluster import images
from e2e.cluster.choose import Cluster, cluster
from e2e.kubectl import Kubectl

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def node() -> Iterator[Cluster]:
    """The cluster itself. This process has its network from here on, and no other."""
    chosen = cluster()
    chosen.build(images.NAMES)
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
