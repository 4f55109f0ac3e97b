"""What one of several engine cores gets of the settings that are for all of them together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo_engine.config import HOST_MEMORY_FRACTION, MAX_RANKS
from octavo_engine.executor.commands import BARRIER_PATIENCE_S

if TYPE_CHECKING:
    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.config import EngineConfig


def core_share(config: EngineConfig) -> EngineConfig:
    """The settings of the core `config.data_parallel_rank`; of the only core, the same ones.

    Threads and memory are divided. The limits of a step (`max_num_seqs` and the like) are each
    core's own, as in vLLM.
    """
    size = config.data_parallel_size
    if size == 1:
        return config
    share = config.replace(
        data_parallel_size=1,
        data_parallel_rank=0,
        memory_fraction=(config.memory_fraction or HOST_MEMORY_FRACTION) / size,
        kv_offloading_size=config.kv_offloading_size / size,
    )
    if config.kv_cache_memory_bytes is not None:
        share = share.replace(kv_cache_memory_bytes=max(1, config.kv_cache_memory_bytes // size))
    if config.device == "sim":
        return share
    return share.replace(num_threads=_own_threads(config))


def expert_peers(config: EngineConfig, file: int | None) -> RankPlace | None:
    """Where the core is among those that have some of the experts each; None: it has them all."""
    if not config.spreads_experts_over_cores:
        return None
    from octavo_engine.backends.native.shard import RankPlace, Shard

    assert file is not None, "cores that compute experts for each other start with memory to share"
    shard = Shard(config.data_parallel_rank, config.data_parallel_size)
    return RankPlace(shard, file, BARRIER_PATIENCE_S)


def settle_ranks(config: EngineConfig) -> EngineConfig:
    """A rank for each memory node that the core may use, where the settings leave it to us."""
    if config.cpu_tp == "off":
        return config
    from octavo_engine.backends.native.placement import num_nodes

    return config.replace(cpu_tp="off", tensor_parallel_size=min(num_nodes(), MAX_RANKS))


def _own_threads(config: EngineConfig) -> int:
    """The calling thread, and all that it starts, stay on the memory nodes of this core's
    threads, where the threads of all cores fill the machine."""
    from octavo_engine import _native
    from octavo_engine.backends.native.placement import cpus_of_workers

    size, rank = config.data_parallel_size, config.data_parallel_rank
    own = max(1, (config.num_threads or _native.available_cores()) // size)
    places = cpus_of_workers(own * size)[rank * own : (rank + 1) * own]
    if places:
        os.sched_setaffinity(0, {cpu for cpus in places for cpu in cpus})
    return own
