"""Models that pool, by the reference's operations: the truth that other backends are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo_engine.backends.torch.loader import TorchLoader
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.torch.reference_pooling import ReferencePoolingOps
from octavo_engine.models.pooled import PooledModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.pooling import PoolingStep
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.weights.checkpoint import Checkpoint


class TorchPoolingBackend:
    """Weights as torch tensors on the CPU."""

    def __init__(
        self,
        config: PoolingConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        precision: Precision | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = config
        self.precision = precision or Precision()
        loader = TorchLoader(checkpoint, self.precision, progress)
        self._model: PooledModel | None = PooledModel(config, loader, max_model_len)
        loader.finish()

    @property
    def name(self) -> str:
        return f"torch/{self.precision.storage or self.precision.dtype}".replace("torch.", "")

    def prepare(self, *, max_tokens: int, max_texts: int) -> None:
        """Nothing is planned here."""

    def pool(self, step: PoolingStep) -> NDArray[np.float32]:
        return self._compute(self._in_memory.forward, step)

    def token_rows(self, step: PoolingStep) -> NDArray[np.float32]:
        return self._compute(self._in_memory.forward_tokens, step)

    def close(self) -> None:
        self._model = None

    @property
    def _in_memory(self) -> PooledModel:
        assert self._model is not None, "the backend was closed"
        return self._model

    def _compute(
        self, forward: Callable[[ReferencePoolingOps], Tensor], step: PoolingStep
    ) -> NDArray[np.float32]:
        with torch.inference_mode():
            rows = forward(ReferencePoolingOps(step, self.precision))
            return np.ascontiguousarray(rows.float().numpy())
