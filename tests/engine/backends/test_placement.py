"""Workers stay with their memory where it is in several nodes, and only there."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from octavo_engine import _native
from octavo_engine.backends.native import placement
from octavo_engine.backends.native.placement import cpus_of_workers, num_nodes
from octavo_engine.config import EngineConfig
from octavo_engine.core.data_parallel.core_share import settle_ranks
from octavo_engine.core.offline.llm import LLM
from octavo_engine.errors import ConfigError
from octavo_engine.state.sampling_params import SamplingParams
from tests.fakes.rank_processes import workers_of

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

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


@pytest.mark.parametrize(
    ("lists", "allowed", "expected"),
    [
        (TWO_NODES, range(8), 2),
        (TWO_NODES, [2, 7], 1),
        (["0-7", ""], range(8), 1),  # memory only
        (["0-1", "2-3", "4-5", "6-7"], [0, 2, 3, 6], 3),
        ([], range(8), 1),
        (["0-3", "4-x"], range(8), 1),
    ],
)
def test_the_nodes_whose_processors_a_process_may_use(
    tmp_path: Path, lists: list[str], allowed: list[int], expected: int
) -> None:
    assert num_nodes(frozenset(allowed), machine(tmp_path, lists)) == expected


@pytest.mark.slow
def test_ranks_by_node_are_settled_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    folder = machine(tmp_path, [str(cpu) for cpu in cpus])
    monkeypatch.setattr(placement, "num_nodes", partial(num_nodes, folder=folder))
    config = EngineConfig(model="demo://smollm2", device="cpu", cpu_tp="auto")
    assert settle_ranks(config).tensor_parallel_size == min(len(cpus), 64)
    assert settle_ranks(config.replace(cpu_tp="off")).tensor_parallel_size == 1
    monkeypatch.setattr(placement, "num_nodes", lambda: 3)
    with LLM.from_config(config.replace(max_model_len=64, num_threads=3)) as llm:
        assert len(workers_of()) == 2
        llm.generate("The", SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "it goes with neither that"),
        ({"pipeline_parallel_size": 2}, "it goes with neither that"),
        ({"distributed_executor_backend": "uni"}, "it goes with neither that"),
        ({"device": "cuda"}, "is for --device cpu only"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, "give --tensor-parallel-size"),
        ({"cpu_tp": "many"}, "--cpu-tp must be one of off, auto; got many"),
    ],
)
def test_settings_that_do_not_go_with_ranks_by_node(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"cpu_tp": "auto", **changes})


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
