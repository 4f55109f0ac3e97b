"""The cluster by kind, where it and Docker are there; Docker builds the images on official ones."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from e2e.cluster import cache, images
from e2e.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_NAME = "octavo-e2e"
_READY_TIMEOUT = "120s"


class KindCluster:
    """See choose.Cluster."""

    @property
    def kubeconfig(self) -> Path:
        return cache.folder() / "kind.conf"

    @property
    def node_address(self) -> str:
        containers = json.loads(_run("docker", "inspect", f"{_NAME}-control-plane"))
        return str(containers[0]["NetworkSettings"]["Networks"]["kind"]["IPAddress"])

    def why_not(self) -> str:
        return ""  # it is chosen only where kind and Docker answer

    def build(self, names: Iterable[str]) -> None:
        for name in names:
            target, own = images.stage(name)
            arguments = {"DEMO_MODEL": "1", **own}
            _run(
                *("docker", "build", "--quiet"),
                *(f"--build-arg={key}={value}" for key, value in arguments.items()),
                *(f"--target={target}", f"--tag={images.reference(name)}", str(cache.ROOT)),
            )

    def archives(self, names: Iterable[str]) -> list[Path]:
        paths = {name: cache.folder() / f"kind-{name}.tar" for name in names}
        for name, path in paths.items():
            _run("docker", "save", f"--output={path}", images.reference(name))
        return list(paths.values())

    def start(self) -> None:
        if self.is_up():
            raise ClusterError("a cluster is up already: python -m e2e.cluster down")
        place = f"--kubeconfig={self.kubeconfig}"
        _run("kind", "create", "cluster", f"--name={_NAME}", place, f"--wait={_READY_TIMEOUT}")
        self.kubectl("-n", "kube-system", "rollout", "status", "deployment/coredns")

    def stop(self) -> None:
        _run("kind", "delete", "cluster", f"--name={_NAME}", f"--kubeconfig={self.kubeconfig}")

    def is_up(self) -> bool:
        return _NAME in _run("kind", "get", "clusters").splitlines()

    def load(self, names: Iterable[str]) -> None:
        names = list(names)
        self.build(names)
        for name in names:
            _run("kind", "load", "docker-image", images.reference(name), f"--name={_NAME}")

    def kill(self, container: str) -> None:
        ctr = ("ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", "--all")
        _run("docker", "exec", f"{_NAME}-control-plane", *ctr, container)

    def kubectl(self, *words: str) -> str:
        return _run(*self.command(["kubectl", *words]))

    def command(self, words: Sequence[str]) -> list[str]:
        return ["env", f"KUBECONFIG={self.kubeconfig}", *words]

    def enter(self) -> None:
        """Nothing to do: nodes of kind answer in this machine's own network."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout
