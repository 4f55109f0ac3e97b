"""K and V of all layers, or their latent vectors, on the device, in blocks of 16 tokens."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.operands import LayerKV
from octavo_engine.caches import KVSpec, LatentSpec, StateSpec, group_layers, one_group
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.caches import CacheLayout, CacheSpec, PagedSpec


def device_layout(specs: Sequence[CacheSpec], *, has_one_table: bool) -> CacheLayout:
    """Groups by windows, where kernels read several block tables and all layers have one shape;
    else every layer keeps all tokens."""
    shapes = {
        (spec.num_kv_heads, spec.head_dim) if isinstance(spec, KVSpec) else None
        for spec in specs
        if not isinstance(spec, StateSpec)
    }
    if has_one_table or len(shapes) != 1 or None in shapes:
        return one_group(specs)
    return group_layers(specs)


class DeviceKV:
    """For each shape of a layer a tensor [2 (K, V), layers, blocks, 16, kv heads, head_dim], of
    latent ones [1, layers, blocks, 16, 1, dim]; in eight bits, another one for the scales
    [2 (K, V), layers, blocks, kv heads, 16].

    Of layers in several groups, which have one shape, those in the same region of a page share
    their memory: a block is one group's at a time.
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
        specs = [spec for spec, _ in layout.paged() if isinstance(spec, (KVSpec, LatentSpec))]
        assert len(specs) == len(layout.paged()), "the device's pages hold keys and values only"
        self._ordinals = layout.ordinals()
        self._places = [place for _, place in layout.paged()]
        shapes = [_shape(spec) for spec in specs]
        has_groups = len(layout.groups) > 1
        assert not has_groups or len(set(shapes)) == 1, "groups share regions of one shape"
        counts = Counter(shapes)
        if has_groups:
            counts = Counter({shapes[0]: 1 + max(place.region for place in self._places)})
        self._data = {
            (parts, *shape): torch.zeros(
                (parts, count, num_blocks, BLOCK_SIZE, *shape), dtype=dtype, device=device
            )
            for (parts, *shape), count in counts.items()
        }
        self._scales = {
            shape: torch.zeros(
                (*data.shape[:3], shape[1], BLOCK_SIZE), dtype=torch.bfloat16, device=device
            )
            for shape, data in self._data.items()
            if has_scales
        }
        taken = dict.fromkeys(self._data, 0)
        self._layers: list[tuple[Tensor, ...]] = []
        self._layer_scales: list[tuple[Tensor, Tensor] | None] = []
        for shape, place in zip(shapes, self._places, strict=True):
            index = place.region if has_groups else taken[shape]
            self._layers.append(self._data[shape][:, index].unbind())
            scales = self._scales.get(shape)
            self._layer_scales.append(
                None if scales is None else (scales[0, index], scales[1, index])
            )
            taken[shape] += 1

    def layer(self, index: int) -> LayerKV:
        """K and V of one layer, by its index into the caches."""
        k, v = self._layers[self._ordinals[index]]
        return LayerKV(k, v, self.scales(index))

    def latents(self, index: int) -> Tensor:
        """The latent vectors of one layer."""
        (vectors,) = self._layers[self._ordinals[index]]
        return vectors

    def group(self, index: int) -> int:
        """Whose block tables a layer has."""
        return self._places[self._ordinals[index]].group

    def scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Of K and V of one layer, where they are in eight bits."""
        return self._layer_scales[self._ordinals[index]]

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


def _shape(spec: PagedSpec) -> tuple[int, int, int]:
    """Vectors that a head keeps of a token, heads, and their width."""
    if isinstance(spec, LatentSpec):
        return 1, 1, spec.dim
    return 2, spec.num_kv_heads, spec.head_dim
