"""Settings of engines with two cores: simulated ones, and small real ones."""

from __future__ import annotations

from typing import Any

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig


def sim_config(max_num_seqs: int, **sim: Any) -> EngineConfig:
    return EngineConfig(
        device="sim",
        max_model_len=512,
        data_parallel_size=2,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        sim=SimConfig(kv_blocks=256, **sim),
    )


def real_config(max_num_seqs: int) -> EngineConfig:
    """Of one core."""
    return EngineConfig(
        model="demo://smollm2",
        device="cpu",
        max_model_len=128,
        num_threads=2,
        kv_cache_memory_bytes=64 << 20,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )
