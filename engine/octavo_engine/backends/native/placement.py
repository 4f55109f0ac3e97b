"""Which processors the workers of a team may use where memory is in several nodes (NUMA).

A worker packs the panels that it will multiply, and the system puts a page into the node of the
processor that touches it first. So a worker that stays in its node streams its weights from there.
"""

from __future__ import annotations

import os
from pathlib import Path

from octavo_engine import _native

NODES = Path("/sys/devices/system/node")


def make_team(
    num_threads: int | None, isa: str = "", *, rank: int = 0, num_ranks: int = 1
) -> _native.Team:
    """As many workers as requested, or as there are cores for this process, in their places.

    Several ranks share them: each has as many, and they stand in the order of ranks.
    """
    own = max(1, (num_threads or _native.available_cores()) // num_ranks)
    cpus = cpus_of_workers(own * num_ranks)
    return _native.Team(own, isa, cpus[rank * own : (rank + 1) * own])


def cpus_of_workers(
    num_threads: int, allowed: frozenset[int] | None = None, folder: Path = NODES
) -> list[list[int]]:
    """For each worker the processors of its node, adjacent ones together; empty: the system
    decides.

    That is so with one node, and where the team does not fill its processors: who else runs on them
    is not known here, and a fixed choice could crowd one node while another is idle.
    """
    if allowed is None:
        allowed = frozenset(os.sched_getaffinity(0))
    nodes = [sorted(allowed & cpus) for cpus in _nodes(folder)]
    workers = [cpus for cpus in nodes for _ in cpus]
    if len(list(filter(None, nodes))) < 2 or len(workers) != num_threads:
        return []
    return workers


def num_nodes(allowed: frozenset[int] | None = None, folder: Path = NODES) -> int:
    """In how many memory nodes this process may use processors; 1 where the system does not say."""
    if allowed is None:
        allowed = frozenset(os.sched_getaffinity(0))
    return max(1, sum(bool(allowed & cpus) for cpus in _nodes(folder)))


def _nodes(folder: Path) -> list[frozenset[int]]:
    """Each node's processors; none where the system does not say."""
    try:
        numbers = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*"))
        return [_parse(folder / f"node{number}" / "cpulist") for number in numbers]
    except (OSError, ValueError):
        return []


def _parse(path: Path) -> frozenset[int]:
    """A list of numbers and ranges: 0-3,8-11."""
    cpus: set[int] = set()
    for part in filter(None, path.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
