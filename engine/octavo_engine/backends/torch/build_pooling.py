"""From the engine's settings to the device backend of a model that pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.build_cuda import settle_dtype
from octavo_engine.backends.torch.cuda_pooling import CudaPoolingBackend
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.config import EngineConfig
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.weights.checkpoint import Checkpoint


def build_cuda_pooling(
    engine: EngineConfig,
    config: PoolingConfig,
    checkpoint: Checkpoint,
    *,
    max_model_len: int,
    progress: Callable[[int, int], None] | None = None,
) -> CudaPoolingBackend:
    """The model on the first GPU. Raises ConfigError and ModelError."""
    if engine.attention_backend == "flashinfer":
        raise ConfigError(
            "--attention-backend flashinfer attends over a KV cache, and models for embeddings and "
            "scores keep none; leave it out"
        )
    return CudaPoolingBackend(
        config,
        checkpoint,
        max_model_len=max_model_len,
        dtype=pooling_dtype(engine, config),
        kernels=engine.kernels,
        use_graphs=not engine.enforce_eager,
        batch_invariant=engine.batch_invariant,
        keep_quantized=engine.quantization != "none",
        progress=progress,
    )


def pooling_dtype(engine: EngineConfig, config: PoolingConfig) -> torch.dtype:
    """As requested, else in 16 bits: an encoder's float32 in float16, which keeps three more bits
    of a number than bfloat16; its values are small. A decoder's may be too large for float16."""
    is_encoder = not isinstance(config.page, ModelConfig)
    if engine.dtype == "auto" and is_encoder and config.torch_dtype == "float32":
        return torch.float16
    return settle_dtype(engine.dtype, config.torch_dtype)
