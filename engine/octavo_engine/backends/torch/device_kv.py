"""K and V of all layers on the device, in blocks of 16 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class DeviceKV:
    """Two tensors [layers, blocks, 16, kv heads, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, num_layers, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(self._data[0, i], self._data[1, i]) for i in range(num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self._layers[index]

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Rows (source block, target block, number of tokens), over all layers."""
        for source, target, num_tokens in copies.tolist():
            self._data[:, :, target, :num_tokens] = self._data[:, :, source, :num_tokens]

    def poison(self, block_ids: list[int]) -> None:
        self._data[:, :, block_ids] = torch.nan
