"""Several ranks of the torch backends as threads of this process: all of it but the processes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.native.shard import RankPlace, Shard
from octavo_engine.backends.step_plan import StepPlan
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.ranks import MAX_MODEL_LEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.caches import CacheLayout
    from tests.engine.models.tiny import TinyModel


class TorchThreadRanks:
    """A LogitsBackend. Ranks above 0 get each step as the bytes of its plan."""

    def __init__(self, size: int, make: Callable[[RankPlace], Any], patience_s: float = 60) -> None:
        torch.set_num_threads(1)
        file = os.memfd_create("octavo-test")
        self._threads = ThreadPoolExecutor(size)
        self.ranks = [make(RankPlace(Shard(rank, size), file, patience_s)) for rank in range(size)]
        os.close(file)  # each has its own descriptor

    @property
    def cache_layout(self) -> CacheLayout:
        layout: CacheLayout = self.ranks[0].cache_layout
        return layout

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        list(self._threads.map(lambda rank: rank.prepare(limits, num_blocks), self.ranks))

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        data = StepPlan.of(step).encode()
        others = [
            self._threads.submit(rank.follow, StepPlan.decode(bytearray(data)).step())
            for rank in self.ranks[1:]
        ]
        logits: NDArray[np.float32] = self.ranks[0].logits(step)
        for other in others:
            other.result()
        return logits

    def poison_blocks(self, block_ids: list[int]) -> None:
        for rank in self.ranks:
            rank.poison_blocks(block_ids)

    def close(self) -> None:
        self._threads.shutdown()
        for rank in self.ranks:
            rank.close()


def reference(model: TinyModel, place: RankPlace | None = None) -> TorchBackend:
    return TorchBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=MAX_MODEL_LEN,
        place=place,
    )
