"""The processes below one, and the processor time they all used: Linux' /proc, read when needed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    # Their own and of the children that each waited for; ticks, since a sum of floats may shrink.
    return ticks_s(
        field
        for member in process_tree(pid)
        for field in stat_fields(f"/proc/{member}/stat")[11:15]
    )


def stat_fields(path: str) -> list[str]:
    """Of a process or a thread, those behind its name; empty if there is none."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []


def ticks_s(fields: Iterable[str]) -> float:
    """The seconds that these fields count together."""
    return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
