"""Where the engine cores of some settings run: threads, processes, one or several of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from octavo_engine.core.data_parallel.data_parallel_client import DataParallelClient
from octavo_engine.core.process.expert_cores import ExpertCores
from octavo_engine.core.process.in_process_client import InProcessClient
from octavo_engine.core.process.process_client import ProcessClient

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.process.client import EngineClient, Listener
    from octavo_engine.core.process.spawn import SpawnedCore
    from octavo_engine.core.process.supervision import Timing


class Connect(Protocol):
    """Makes the client of a core; a place for tests to put their own."""

    def __call__(self, config: EngineConfig, listener: Listener) -> EngineClient: ...


def in_process(config: EngineConfig, listener: Listener) -> EngineClient:
    from octavo_engine.core.build_core import build_core  # what computes, of no use elsewhere

    return InProcessClient(config, listener, build=build_core)


def in_child_process(config: EngineConfig, listener: Listener) -> EngineClient:
    return ProcessClient(config, listener)


def choose_connect(
    config: EngineConfig, timing: Timing | None = None, spawned: SpawnedCore | None = None
) -> Connect:
    """The simulator shares this process, unless it is to be lost and started again. A core that was
    `spawned` ahead is the first one."""
    if config.device == "sim" and not config.sim.loses_ranks:
        return in_process
    if config.spreads_experts_over_cores:
        cores = ExpertCores(config.data_parallel_size)
        return partial(ProcessClient, timing=timing, expert_cores=cores)
    return partial(ProcessClient, timing=timing, spawned=spawned)


def connect_cores(config: EngineConfig, listener: Listener, connect: Connect) -> EngineClient:
    """One client, however many cores there are. Call it on the event loop."""
    if config.data_parallel_size > 1:
        return DataParallelClient(config, listener, connect)
    return connect(config, listener)
