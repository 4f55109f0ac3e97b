"""Several ranks of the native backend as threads of this process: all of it but the processes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.native.shard import RankPlace, Shard
from octavo_engine.backends.step_plan import StepPlan
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.caches import CacheLayout
    from octavo_engine.weights.adapter import AdapterFiles
    from tests.engine.backends.driver import LogitsBackend
    from tests.engine.models.tiny import TinyModel

MAX_MODEL_LEN = 160
FORMATS = (
    {"dtype": "f32"},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "int4", "activation_bits": 8},
)


class ThreadRanks:
    """A LogitsBackend. Ranks above 0 get each step as the bytes of its plan."""

    def __init__(self, model: TinyModel, size: int, *, num_threads: int, **options: Any) -> None:
        self._file = os.memfd_create("octavo-test")
        self.ranks = [
            NativeBackend(
                ModelConfig.from_hf(model.config),
                model.checkpoint(),
                max_model_len=MAX_MODEL_LEN,
                num_threads=num_threads,
                place=RankPlace(Shard(rank, size), self._file, patience_s=60.0),
                **options,
            )
            for rank in range(size)
        ]
        self._threads = ThreadPoolExecutor(size)

    @property
    def cache_layout(self) -> CacheLayout:
        return self.ranks[0].cache_layout

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        for backend in self.ranks:
            backend.prepare(limits, num_blocks)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        data = StepPlan.of(step).encode()
        others = [
            self._threads.submit(backend.logits, StepPlan.decode(data).step())
            for backend in self.ranks[1:]
        ]
        logits = self.ranks[0].logits(step)
        for other in others:
            other.result()
        return logits

    def pack_adapter(self, files: AdapterFiles) -> list[Any]:
        return [backend.pack_adapter(files) for backend in self.ranks]

    def set_adapter(self, slot: int, packed: list[Any] | None) -> None:
        for rank, backend in enumerate(self.ranks):
            backend.set_adapter(slot, None if packed is None else packed[rank])

    def poison_blocks(self, block_ids: list[int]) -> None:
        for backend in self.ranks:
            backend.poison_blocks(block_ids)

    def close(self) -> None:
        self._threads.shutdown()
        for backend in self.ranks:
            backend.close()
        os.close(self._file)


def alone(model: TinyModel, **options: Any) -> NativeBackend:
    return NativeBackend(
        ModelConfig.from_hf(model.config),
        model.checkpoint(),
        max_model_len=MAX_MODEL_LEN,
        num_threads=1,
        **options,
    )


def mixed_steps(backend: LogitsBackend, *, copies: bool = True) -> NDArray[np.float32]:
    """A prompt in one piece, one in chunks beside it, single tokens of both, and a prefix of the
    first: of one block copied too, or of shared blocks."""
    driver = Driver(backend)
    first = driver.add(3, random_tokens(70, seed=1))
    second = driver.add(1, random_tokens(60, seed=2))
    driver.step([(first, 66)])
    driver.step([(second, 20), (first, 1)])
    driver.step([(first, 1), (second, 37)])
    driver.step([(second, 1), (first, 1)])
    if copies:
        third = driver.add(5, random_tokens(30, seed=1)[:24])
        third.blocks, third.num_computed = [first.blocks[0], driver.take_block()], 20
        driver.step([(second, 1), (third, 4)], copies=[(first.blocks[1], third.blocks[1], 4)])
    else:
        third = driver.add(5, random_tokens(40, seed=1), prefix=first)
        driver.step([(second, 1), (third, 8)])
    return np.concatenate([first.logits, second.logits, third.logits])


def check_as_alone(ranks: ThreadRanks, model: TinyModel, **options: Any) -> None:
    """The same bits as of one process; ends the ranks."""
    np.testing.assert_array_equal(mixed_steps(ranks), mixed_steps(alone(model, **options)))
    ranks.close()
