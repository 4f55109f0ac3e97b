"""How long a step takes where several simulated processes compute it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig, SimConfig


def exchange_seconds(sim: SimConfig) -> float:
    """What all ranks of a step wait for each other, or a stage for the rows of the one before."""
    return sim.exchange_ms * 1e-3 * sim.time_scale


def rank_seconds(config: EngineConfig, alone_s: float) -> float:
    """Of ranks that share each layer: all wait for the one that has most to do."""
    size = config.tensor_parallel_size
    if size == 1:
        return alone_s
    return alone_s / size * (1 + config.sim.rank_skew) + exchange_seconds(config.sim)


def stage_seconds(config: EngineConfig, alone_s: float) -> list[float]:
    """Of each stage. The first one has most to do, the others the rest evenly."""
    size = config.pipeline_parallel_size
    if size == 1:
        return [alone_s]
    first = alone_s / size * (1 + config.sim.rank_skew)
    return [first, *[(alone_s - first) / (size - 1)] * (size - 1)]
