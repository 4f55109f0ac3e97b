"""The programs of Debian that nodes and stories run on, installed where they are absent."""

from __future__ import annotations

import os
import shutil
import subprocess

from e2e.cluster.errors import ClusterError

# Program → the package that has it.
PROGRAMS = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "unshare": "util-linux",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    # Beside a running cluster some machines resolve no names, so it is there before.
    "docker-registry": "docker-registry",
}


def missing() -> list[str]:
    return sorted({package for program, package in PROGRAMS.items() if not shutil.which(program)})


def why_not() -> str:
    """Names the packages where this user may not install them."""
    packages = missing()
    if not packages or (os.geteuid() == 0 and shutil.which("apt-get")):
        return ""
    return f"install these Debian packages: {' '.join(packages)}"


def install_missing() -> None:
    if reason := why_not():
        raise ClusterError(reason)
    if packages := missing():
        install(*packages)


def install(*packages: str) -> None:
    """As root on Debian. Raises ClusterError."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    for command in (["apt-get", "update", "--quiet"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
