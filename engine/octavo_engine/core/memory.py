"""How much memory is really free for this process: the machine's, within its cgroups' limits."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = "proc/meminfo"
_CGROUP = "proc/self/cgroup"
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a huge number


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be taken without swapping or being killed."""
    candidates = [_available(root), *_cgroup_v2(root), *_cgroup_v1(root)]
    return max(0, min(candidates))


def _available(root: Path) -> int:
    try:
        lines = (root / _MEMINFO).read_text().splitlines()
    except FileNotFoundError:  # no Linux: half of what there is, for want of a better answer
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields: dict[str, int] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields.get("MemAvailable", fields.get("MemFree", 0))


def _cgroup_v2(root: Path) -> list[int]:
    """What is left under each memory.max from our own group up to the root."""
    mount = root / "sys/fs/cgroup"
    own = _own_group(root, "")
    left = []
    for folder in _upwards(mount, own):
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            left.append(limit - used + _field(folder / "memory.stat", "inactive_file"))
    return left


def _cgroup_v1(root: Path) -> list[int]:
    mount = root / "sys/fs/cgroup/memory"
    own = _own_group(root, "memory")
    left = []
    for folder in _upwards(mount, own):
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < _UNLIMITED and used is not None:
            left.append(limit - used + _field(folder / "memory.stat", "total_inactive_file"))
    return left


def _own_group(root: Path, controller: str) -> str:
    """Our group's path under the hierarchy of `controller`; "" names the unified one."""
    try:
        lines = (root / _CGROUP).read_text().splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's folder and its parents up to the mount; in a container only the mount exists."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    folders = [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _field(path: Path, name: str) -> int:
    """Page cache that the kernel gives back at once counts as free."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
