"""Workers stay with their memory where it is in several nodes, and only there."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from octavo_engine import _native
from octavo_engine.backends.native.placement import cpus_of_workers

if TYPE_CHECKING:
    from pathlib import Path

TWO_NODES = ["0-1,4-5", "2-3,6-7"]


def machine(folder: Path, lists: list[str]) -> Path:
    for number, cpus in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cpus + "\n")
    return folder


@pytest.mark.parametrize(
    ("lists", "allowed", "num_threads", "expected"),
    [
        (TWO_NODES, range(8), 8, [[0, 1, 4, 5]] * 4 + [[2, 3, 6, 7]] * 4),
        (TWO_NODES, [1, 2, 3], 3, [[1], [2, 3], [2, 3]]),  # a fixed set of processors
        (TWO_NODES, range(8), 4, []),  # a quota: others run here too
        (TWO_NODES, [0, 1], 2, []),  # one node's
        (["0-7", ""], range(8), 8, []),  # the other one has memory only
        (["0-7"], range(8), 8, []),
        ([], range(8), 8, []),  # not told
        (["0-3", "4-x"], range(8), 8, []),
        (["0-3", "4-6"], range(8), 8, []),  # processor 7 is in none
        (["0-1"] + [""] * 9 + ["2"], range(3), 3, [[0, 1], [0, 1], [2]]),  # node 10 comes last
    ],
)
def test_workers_stay_in_their_node_where_the_team_fills_several(
    tmp_path: Path,
    lists: list[str],
    allowed: list[int],
    num_threads: int,
    expected: list[list[int]],
) -> None:
    folder = machine(tmp_path, lists)
    assert cpus_of_workers(num_threads, frozenset(allowed), folder) == expected


def affinities() -> dict[int, set[int]]:
    return {int(tid): os.sched_getaffinity(int(tid)) for tid in os.listdir("/proc/self/task")}


def test_a_team_binds_its_threads_and_not_its_caller() -> None:
    mine = os.sched_getaffinity(0)
    first = min(mine)
    before = affinities()
    team = _native.Team(2, cpus=[sorted(mine), [first]])
    deadline = time.monotonic() + 20
    while (bound := [cpus for tid, cpus in affinities().items() if tid not in before]) != [{first}]:
        assert time.monotonic() < deadline, bound
    assert os.sched_getaffinity(0) == mine
    assert team.num_threads == 2


@pytest.mark.parametrize("cpus", [[[0]], [[0], [-1]], [[0], [4096]], [[0], []]])
def test_processors_that_cannot_be_are_refused(cpus: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="cpus"):
        _native.Team(2, cpus=cpus)
