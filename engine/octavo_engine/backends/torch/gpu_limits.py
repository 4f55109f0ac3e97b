"""What the GPU is, and what its kernels refuse of a model: what `--device auto` asks before a model
is loaded. The checks are those that the backends themselves begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo_engine.backends.torch.attention_kinds import check_attention
from octavo_engine.backends.torch.cuda_pooling import check_pooled
from octavo_engine.backends.torch.kernels import settle_kernels
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.models.pooling_config import PoolingConfig


class Gpu(NamedTuple):
    """The first one."""

    name: str
    free_bytes: int


def see_gpu() -> Gpu | None:
    """None where torch sees none."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", 0)
    free, _ = torch.cuda.mem_get_info(device)
    return Gpu(torch.cuda.get_device_name(device), free)


def check_kernels_on_gpu(engine: EngineConfig, model: ModelConfig | PoolingConfig) -> None:
    """Raises ConfigError and ModelError where the kernels that suit the GPU do not compute it."""
    name, reason = settle_kernels(torch.device("cuda", 0), engine.kernels)
    if name == "plain" and engine.batch_invariant:
        raise ConfigError(f"batch-invariant results need the Triton kernels; {reason}")
    if not isinstance(model, ModelConfig):
        check_pooled(model, name)
        return
    check_attention(model, engine.attention_backend)
