"""How a model is computed on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.native.shard import Shard, cut_heads
from octavo_engine.backends.torch.attention_kinds import check_attention
from octavo_engine.backends.torch.head_shape import OwnShape
from octavo_engine.backends.torch.kernels import choose_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.torch.head_shape import HeadShape
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.backends.torch.memory import DeviceMemory
    from octavo_engine.config import AttentionBackend, KernelChoice, KVCacheDType
    from octavo_engine.models.config import ModelConfig

WHOLE = Shard()


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSettings:
    dtype: torch.dtype = torch.bfloat16
    kernels: KernelChoice = "auto"
    attention: AttentionBackend = "auto"
    use_graphs: bool = True
    batch_invariant: bool = False
    kv_cache_dtype: KVCacheDType = "auto"
    has_tiers: bool = False  # copies of KV blocks need memory too
    num_drafts: int = 0  # tokens that a step verifies of a sequence at most
    label: str = "cuda"
    # How much memory a device has that is neither a GPU nor the host.
    memory_of: Callable[[], DeviceMemory | None] | None = None

    def kernels_for(
        self, config: ModelConfig, device: torch.device, shard: Shard = WHOLE
    ) -> Kernels:
        """Of a rank for its heads. Raises ConfigError where they do not compute the model."""
        check_attention(config, self.attention)
        return choose_kernels(
            device, self.dtype, _own_shape(config, shard),
            choice=self.kernels, attention=self.attention,
            batch_invariant=self.batch_invariant, latent=config.latent,
        )  # fmt: skip


def _own_shape(config: ModelConfig, shard: Shard) -> HeadShape:
    if shard.size == 1:
        return config
    own = cut_heads(config.num_heads, config.num_kv_heads, shard)
    return OwnShape(own.num_heads, own.num_kv_heads, config.head_dim)
