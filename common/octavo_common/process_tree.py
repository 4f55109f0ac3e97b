"""The processes below one, and the processor time they all used: Linux' /proc, read when needed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def process_tree(pid: int) -> list[int]:
    """A process and all below it, itself first."""
    found = [pid]
    for parent in found:  # grows meanwhile
        with suppress(OSError):  # it has just ended
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """Of a process and all that it started, those that have ended and were waited for included.

    0 where there is no /proc. Only grows, but for processes whose parent ended before them.
    """
    return sum(map(_cpu_seconds, process_tree(pid)))


def _cpu_seconds(pid: int) -> float:
    """Its own, and of the children that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
