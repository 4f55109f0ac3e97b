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
    """For each shape of a layer a tensor [2 (K, V), layers, blocks, 16, kv heads, head_dim]; in
    eight bits, another one for the scales [2 (K, V), layers, blocks, kv heads, 16].

    All layers are in one group here: captured graphs and FlashInfer read one block table.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        has_scales: bool = False,
    ) -> None:
        assert len(layout.groups) == 1, "the device has one block table"
        specs = [spec for spec in layout.specs if isinstance(spec, KVSpec)]
        assert len(specs) == len(layout.specs), "the device keeps keys and values only"
        shapes = [(spec.num_kv_heads, spec.head_dim) for spec in specs]
        self._data = {
            shape: torch.zeros(
                (2, count, num_blocks, BLOCK_SIZE, *shape), dtype=dtype, device=device
            )
            for shape, count in Counter(shapes).items()
        }
        self._scales = {
            shape: torch.zeros(
                (*data.shape[:3], shape[0], BLOCK_SIZE), dtype=torch.bfloat16, device=device
            )
            for shape, data in self._data.items()
            if has_scales
        }
        taken = dict.fromkeys(self._data, 0)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._layer_scales: list[tuple[Tensor, Tensor] | None] = []
        for shape in shapes:
            data, index = self._data[shape], taken[shape]
            self._layers.append((data[0, index], data[1, index]))
            scales = self._scales.get(shape)
            self._layer_scales.append(
                None if scales is None else (scales[0, index], scales[1, index])
            )
            taken[shape] += 1

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self._layers[index]

    def scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Of K and V of one layer, where they are in eight bits."""
        return self._layer_scales[index]

    @property
    def page_words(self) -> int:
        return sum(region.shape[0] * region.shape[2] for region in self.regions())

    def regions(self) -> list[Tensor]:
        """What blocks lie in, as int32 words [rows, blocks, words]; together, row by row, they are
        a block's page."""
        return [
            data.view(-1, data.shape[2], data[0, 0, 0].numel()).view(torch.int32)
            for data in (*self._data.values(), *self._scales.values())
        ]

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Rows (source block, target block, number of tokens), over all layers."""
        for source, target, num_tokens in copies.tolist():
            for data in self._data.values():
                data[:, :, target, :num_tokens] = data[:, :, source, :num_tokens]
            for scales in self._scales.values():
                scales[:, :, target, :, :num_tokens] = scales[:, :, source, :, :num_tokens]

    def poison(self, block_ids: list[int]) -> None:
        for data in self._data.values():
            if data.dtype.itemsize == 1:
                data.view(torch.uint8)[:, :, block_ids] = 0x7F  # NaN
            else:
                data[:, :, block_ids] = torch.nan
        for scales in self._scales.values():
            scales[:, :, block_ids] = torch.nan
