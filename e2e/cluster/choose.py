"""Which cluster there is to be had: kind where it and Docker are there, else our own."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Protocol

from e2e.cluster.kind import KindCluster
from e2e.cluster.own import OwnCluster

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class Cluster(Protocol):
    """One Kubernetes node. All methods raise ClusterError."""

    @property
    def kubeconfig(self) -> Path: ...

    @property
    def node_address(self) -> str:
        """Where NodePorts answer, within `command` and after `enter`."""

    def why_not(self) -> str:
        """Why this machine cannot hold it, and what to do; or ''."""

    def build(self, names: Iterable[str]) -> None:
        """What `start` and `load` need: then they take seconds. Keeps it for the next time."""

    def archives(self, names: Iterable[str]) -> list[Path]:
        """The images as `docker save` writes them."""

    def start(self) -> None:
        """Returns when the node is ready and names resolve. Refuses where one is up already."""

    def stop(self) -> None:
        """Leaves nothing but the caches; is content where nothing runs."""

    def is_up(self) -> bool: ...

    def load(self, names: Iterable[str]) -> None:
        """Of images.NAMES; pods then have them without pulling."""

    def kill(self, container: str) -> None:
        """SIGKILL to all of a container's processes, by containerd's number of it."""

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs `words` from anywhere so that the cluster's network is there."""

    def enter(self) -> None:
        """Gives this thread, and those that it starts, the cluster's network."""


def cluster() -> Cluster:
    return KindCluster() if _has_kind() else OwnCluster()


def _has_kind() -> bool:
    if not (shutil.which("kind") and shutil.which("docker") and shutil.which("kubectl")):
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
