"""From settings to whichever engine the model wants: one that generates, or one that pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.core.build import build_engine
from octavo_engine.core.data_parallel.core_share import core_share, expert_peers, settle_ranks
from octavo_engine.core.device_choice import settle_device
from octavo_engine.core.expected_files import check_runner
from octavo_engine.core.model_files import resolve
from octavo_engine.core.pooling.build import build_pooling_engine, pooling_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.core_engine import CoreEngine
    from octavo_engine.core.info import ModelInfo


def build_core(
    config: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    backend: Backend | None = None,
    expert_file: int | None = None,
) -> tuple[CoreEngine, ModelInfo]:
    """Load, size and warm up. Raises ConfigError or ModelError; then nothing is left behind.

    One of several cores takes its share: see `core_share`. A `backend` that is given generates; it
    is used instead of the one that the settings name. `expert_file` is memory that cores share
    which compute experts for each other.
    """
    files = resolve(config)
    pooling = None if backend is not None else pooling_config(config, files)
    if backend is None:  # by the settings of all cores, of which some rule a GPU out
        config = settle_device(config, files, pooling)
    peers = expert_peers(config, expert_file)
    config = settle_ranks(core_share(config))
    check_runner(config, pools=pooling is not None)
    if pooling is not None:
        return build_pooling_engine(config, pooling, files, progress=progress)
    return build_engine(config, files=files, progress=progress, backend=backend, peers=peers)
