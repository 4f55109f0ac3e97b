"""Several stages of the native backend in this thread, one after another: all of it but the
processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.native.stages import StagePlace
from octavo_engine.backends.step_plan import StepPlan
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.ranks import MAX_MODEL_LEN

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendLimits, BackendStep
    from octavo_engine.caches import CacheLayout
    from octavo_engine.weights.adapter import AdapterFiles
    from tests.engine.models.tiny import TinyModel


class ChainedStages:
    """A LogitsBackend. Each stage gets the step as the bytes of its plan, and the rows that the
    stage before it left."""

    def __init__(
        self,
        model: TinyModel,
        count: int,
        *,
        layers: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        self.stages = [
            NativeBackend(
                ModelConfig.from_hf(model.config),
                model.checkpoint(),
                max_model_len=MAX_MODEL_LEN,
                num_threads=1,
                stage=StagePlace(index, count, layers),
                **options,
            )
            for index in range(count)
        ]

    @property
    def cache_layout(self) -> CacheLayout:
        return self.stages[0].cache_layout

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        for backend in self.stages:
            backend.prepare(limits, num_blocks)

    def logits(self, step: BackendStep) -> NDArray[np.float32]:
        data = StepPlan.of(step).encode()
        rows = np.zeros((0, 0), np.float32)
        for index, backend in enumerate(self.stages):
            own = StepPlan.decode(data).step()
            if index:
                own.inputs, own.input_rows = rows, np.arange(len(rows), dtype=np.int32)
            rows = np.array(backend.logits(own))
        return rows

    def pack_adapter(self, files: AdapterFiles) -> list[Any]:
        return [backend.pack_adapter(files) for backend in self.stages]

    def set_adapter(self, slot: int, packed: list[Any] | None) -> None:
        for index, backend in enumerate(self.stages):
            backend.set_adapter(slot, None if packed is None else packed[index])

    def poison_blocks(self, block_ids: list[int]) -> None:
        for backend in self.stages:
            backend.poison_blocks(block_ids)

    def poison_states(self, slots: list[int]) -> None:
        for backend in self.stages:
            if backend.has_states:
                backend.poison_states(slots)

    def close(self) -> None:
        for backend in self.stages:
            backend.close()
