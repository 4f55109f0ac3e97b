"""How full memory is, and what that means for requests: better to refuse some than to be killed.

    OK ──85 %──► TIGHT: who would have to wait is refused
                   └──95 %──► FULL: everybody is refused, before the body is read; probes are not

Back again 5 % lower. Looking is pure but for a handful of files under `root`.
"""

from __future__ import annotations

import logging
import os
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo_common.heap import give_memory_back

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("octavo.router")

_TIGHT: Final = 0.85  # of the limit
_FULL: Final = 0.95
_BACK: Final = 0.05
_NO_LIMIT: Final = 2**60  # what version 1 of control groups calls none


class Level(IntEnum):
    OK = 0
    TIGHT = 1
    FULL = 2


class MemoryUse(NamedTuple):
    used_bytes: int
    limit_bytes: int


def level_of(share: float, before: Level) -> Level:
    """By the share of the limit that is used."""
    if share >= _FULL or (before == Level.FULL and share >= _FULL - _BACK):
        return Level.FULL
    if share >= _TIGHT or (before >= Level.TIGHT and share >= _TIGHT - _BACK):
        return Level.TIGHT
    return Level.OK


def read_memory(
    limit_bytes: int,
    root: Path = Path("/"),
    *,
    is_container: bool | None = None,
    num_processes: int = 1,
) -> MemoryUse | None:
    """This process's memory under `limit_bytes`; where that is 0 its container's, else its share of
    half the machine's: others live there too. None: nothing is known.

    A container counts where nobody else lives in it: we are its first process, or a worker of that.
    """
    if limit_bytes:
        return MemoryUse(_resident(root), limit_bytes)
    if not (1 in (os.getpid(), os.getppid()) if is_container is None else is_container):
        return _of_machine(root, num_processes)
    groups = root / "sys/fs/cgroup"
    for folder, limit_name, used_name in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        if used >= (_TIGHT - _BACK) * limit:  # only then: it is not cheap to read
            used -= _cached_files(folder / "memory.stat")
        return MemoryUse(max(used, 0), limit)
    return _of_machine(root, num_processes)


def _of_machine(root: Path, num_processes: int) -> MemoryUse | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        used = _resident(root)
    except OSError:  # no Linux
        return None
    total = next((int(line.split()[1]) for line in lines if line.startswith("MemTotal:")), 0)
    return MemoryUse(used, total * 1024 // 2 // num_processes) if total else None


def _resident(root: Path) -> int:
    pages = int((root / "proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class MemoryWatch:
    """Call `look` a few times a second. `on_level` is called on changes."""

    def __init__(
        self,
        limit_bytes: int,
        on_level: Callable[[Level], None],
        *,
        num_processes: int = 1,
        read: Callable[[int], MemoryUse | None] | None = None,
        give_back: Callable[[], None] = give_memory_back,
    ) -> None:
        self.limit_bytes = limit_bytes  # may be replaced at any time
        self.level = Level.OK
        self._on_level = on_level
        self._read = read or partial(read_memory, num_processes=num_processes)
        self._give_back = give_back

    def look(self, awaited_bytes: int = 0) -> None:
        """`awaited_bytes` are on their way and were let in: they count as if they were there."""
        share = self._share(awaited_bytes)
        level = level_of(share, self.level)
        if level:  # what was freed may not have left the process yet
            self._give_back()
            share = self._share(awaited_bytes)
            level = level_of(share, self.level)
        if level == self.level:
            return
        self.level = level
        log = logger.warning if level else logger.info
        log("Memory is %s", level.name.lower(), extra={"share": round(share, 3)})
        self._on_level(level)

    def _share(self, awaited_bytes: int) -> float:
        memory = self._read(self.limit_bytes)
        if memory is None:
            return 0.0
        return (memory.used_bytes + awaited_bytes) / memory.limit_bytes


def _cached_files(stat: Path) -> int:
    """What the kernel would give back before it kills anybody."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(fields.get("inactive_file", fields.get("total_inactive_file", "0")))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
