"""K and V of all layers on the device, in blocks of 16 tokens."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from octavo_engine.caches import KVSpec
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.caches import CacheLayout


class DeviceKV:
    """For each shape of a layer a tensor [2 (K, V), layers, blocks, 16, kv heads, head_dim].

    All layers are in one group here: captured graphs and FlashInfer read one block table.
    """

    def __init__(
        self, layout: CacheLayout, *, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert len(layout.groups) == 1, "the device has one block table"
        specs = [spec for spec, _ in layout.paged() if isinstance(spec, KVSpec)]
        assert len(specs) == len(layout.paged()), "the device's pages hold keys and values only"
        self._ordinals = layout.ordinals()
        shapes = [(spec.num_kv_heads, spec.head_dim) for spec in specs]
        self._data = {
            shape: torch.zeros(
                (2, count, num_blocks, BLOCK_SIZE, *shape), dtype=dtype, device=device
            )
            for shape, count in Counter(shapes).items()
        }
        taken = dict.fromkeys(self._data, 0)
        self._layers: list[tuple[Tensor, Tensor]] = []
        for shape in shapes:
            data, index = self._data[shape], taken[shape]
            self._layers.append((data[0, index], data[1, index]))
            taken[shape] += 1

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, by its index into the caches."""
        return self._layers[self._ordinals[index]]

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Rows (source block, target block, number of tokens), over all layers."""
        for source, target, num_tokens in copies.tolist():
            for data in self._data.values():
                data[:, :, target, :num_tokens] = data[:, :, source, :num_tokens]

    def poison(self, block_ids: list[int]) -> None:
        for data in self._data.values():
            data[:, :, block_ids] = torch.nan
