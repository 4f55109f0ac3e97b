"""Where everything of one run lies, and the addresses within its network."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NODE_NAME = "node0"
NODE_ADDRESS = "172.30.0.10"
POD_NETWORK = "10.244.0.0/24"
SERVICE_NETWORK = "10.96.0.0/16"
DNS_ADDRESS = "10.96.0.10"
API_PORT = 6443
COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders and files of one run."""

    root: Path

    def make(self, programs: Path) -> None:
        for folder in (self.bin, self.logs, self.loaded, self.pki, self.network, self.kubelet):
            folder.mkdir(parents=True)
        for name in COMPONENTS:  # the program is what it is called
            (self.bin / name).symlink_to(programs / "octavo-node")

    @property
    def control_group(self) -> str:
        """Another for each folder, so that clusters of two folders do not meet."""
        return f"octavo-e2e-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}"

    @property
    def lock(self) -> Path:
        """Held while a cluster lives here; beside the folder, which comes and goes."""
        return self.root.with_name(f"{self.root.name}.lock")

    @property
    def failed(self) -> Path:
        """The logs of a start that did not succeed."""
        return self.root.with_name(f"{self.root.name}.failed")

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def loaded(self) -> Path:
        """An empty file for each archive of an image that the cluster has."""
        return self.root / "loaded"

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def network(self) -> Path:
        """Of the settings of pods' network."""
        return self.root / "net.d"

    @property
    def kubelet(self) -> Path:
        return self.root / "kubelet"

    @property
    def containerd(self) -> Path:
        return self.root / "containerd"

    @property
    def containerd_socket(self) -> Path:
        return self.root / "containerd.sock"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "admin.conf"

    @property
    def state(self) -> Path:
        """Names the first process."""
        return self.root / "state.json"

    @property
    def ready(self) -> Path:
        """Exists once the node is ready."""
        return self.root / "ready"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"
