"""What the simulator has other machines do: the order of the ways, and what does not fit."""

from __future__ import annotations

import pytest

from benchmarks.parallel_model import (
    CASES,
    CORES,
    GPUS,
    Machine,
    ModelShape,
    table,
    tokens_per_s,
    ways,
)

_, MIXTURE = CASES[3]
DENSE = ModelShape(name="dense", layers=32, dense=8.0)


def speeds(machine: Machine, shape: ModelShape, streams: int) -> dict[str, float]:
    return {
        way.name.replace(f" {machine.units}", ""): tokens_per_s(machine, shape, way, streams, 256)
        for way in ways(machine, shape)
    }


def test_a_single_stream_gains_by_ranks_alone() -> None:
    found = speeds(GPUS, DENSE, 1)
    assert found["tensor"] > 2 * found["one GPU"]
    assert found["pipeline"] <= found["one GPU"]
    assert found["data"] == pytest.approx(found["one GPU"])


def test_many_streams_gain_by_every_way() -> None:
    found = speeds(CORES, DENSE, 64)
    for way in ("tensor", "pipeline", "data"):
        assert found["one node"] < found[way] <= 2.02 * found["one node"]


def test_uneven_experts_cost_speed_until_they_are_moved() -> None:
    found = speeds(GPUS, MIXTURE, 32)
    assert found["tensor, whole experts"] < 0.9 * found["tensor"]
    assert found["tensor, whole experts, moved"] == pytest.approx(found["tensor"], rel=0.02)


def test_the_tables() -> None:
    for machine, shape in CASES:
        lines = table(machine, shape, [1, 4], 1024)
        assert shape.name in lines[0]
        assert len(lines) == 2 + len(list(ways(machine, shape)))
        alone, data = lines[2], lines[5]
        assert ("does not fit" in alone) == ("does not fit" in data) == (machine is GPUS)
