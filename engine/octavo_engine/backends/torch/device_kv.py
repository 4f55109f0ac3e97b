"""K and V of all layers, or their latent vectors, on the device, in blocks of 16 tokens."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from octavo_engine.caches import KVSpec, LatentSpec
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.caches import CacheLayout, PagedSpec


class DeviceKV:
    """For each shape of a layer a tensor [2 (K, V), layers, blocks, 16, kv heads, head_dim], of
    latent ones [1, layers, blocks, 16, 1, dim].

    All layers are in one group here: captured graphs and FlashInfer read one block table.
    """

    def __init__(
        self, layout: CacheLayout, *, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert len(layout.groups) == 1, "the device has one block table"
        specs = [spec for spec in layout.specs if isinstance(spec, (KVSpec, LatentSpec))]
        assert len(specs) == len(layout.specs), "the device keeps keys and values only"
        shapes = [_shape(spec) for spec in specs]
        self._data = {
            (parts, *shape): torch.zeros(
                (parts, count, num_blocks, BLOCK_SIZE, *shape), dtype=dtype, device=device
            )
            for (parts, *shape), count in Counter(shapes).items()
        }
        taken = dict.fromkeys(self._data, 0)
        self._layers: list[tuple[Tensor, ...]] = []
        for shape in shapes:
            self._layers.append(self._data[shape][:, taken[shape]].unbind())
            taken[shape] += 1

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        k, v = self._layers[index]
        return k, v

    def latents(self, index: int) -> Tensor:
        """The latent vectors of one layer."""
        (vectors,) = self._layers[index]
        return vectors

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Rows (source block, target block, number of tokens), over all layers."""
        for source, target, num_tokens in copies.tolist():
            for data in self._data.values():
                data[:, :, target, :num_tokens] = data[:, :, source, :num_tokens]

    def poison(self, block_ids: list[int]) -> None:
        for data in self._data.values():
            data[:, :, block_ids] = torch.nan


def _shape(spec: PagedSpec) -> tuple[int, int, int]:
    """Vectors that a head keeps of a token, heads, and their width."""
    if isinstance(spec, LatentSpec):
        return 1, 1, spec.dim
    return 2, spec.num_kv_heads, spec.head_dim
