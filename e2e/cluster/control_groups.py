"""The control groups of the cluster's pods: a tree per hierarchy, made before, removed after."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from e2e.cluster.errors import ClusterError

_MOUNT = Path("/sys/fs/cgroup")
_REMOVE_TIMEOUT_S = 10.0


def why_not() -> str:
    locked = [str(root) for root in _roots() if not os.access(root, os.W_OK)]
    return f"pods need control groups: {', '.join(locked)} cannot be written" if locked else ""


def create(name: str) -> None:
    """The kubelet wants its root to exist, with all controllers that it uses."""
    for root in _roots():
        group = root / name
        group.mkdir(exist_ok=True)
        if (root / "cgroup.controllers").exists() and is_unified():
            controllers = (root / "cgroup.controllers").read_text().split()
            for parent in (root, group):
                for controller in controllers:
                    (parent / "cgroup.subtree_control").write_text(f"+{controller}")
        elif (
            root.name == "cpuset"
        ):  # of version 1: empty until set, and until then no process may enter
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (group / setting).write_text((root / setting).read_text())


def remove(name: str) -> None:
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    for root in _roots():
        # The deepest first: only an empty group can be removed.
        found = sorted((root / name).rglob("*/"), key=lambda path: len(path.parts), reverse=True)
        for group in [*found, root / name]:
            _remove(group, deadline)


def is_unified() -> bool:
    return (_MOUNT / "cgroup.controllers").exists()


def _roots() -> list[Path]:
    if is_unified():
        return [_MOUNT]
    return [path for path in _MOUNT.iterdir() if path.is_dir() and not path.is_symlink()]


def _remove(group: Path, deadline: float) -> None:
    while group.is_dir():
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise ClusterError(f"{group} cannot be removed: {error}") from error
            time.sleep(0.05)  # its last process is being buried
