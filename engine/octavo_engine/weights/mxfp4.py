"""gpt-oss's experts in 4 bits as published in safetensors: each one's matrices as MXFP4 blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.integer_blocks import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from octavo_engine.errors import ModelError
    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = BLOCK // 2
_NO_NUMBER = 255  # as a scale


class _Place(NamedTuple):
    stem: str  # of both tensors' names
    expert: int
    rows: slice


class Mxfp4Experts:
    """A checkpoint with matrices NAME_blocks [experts, rows, groups, 16 bytes] and NAME_scales
    [experts, rows, groups] under the names of each expert's own. Rows of gate and up take turns."""

    def __init__(self, inner: SafetensorsCheckpoint) -> None:
        self._inner = inner
        names = frozenset(inner.names())
        self._places: dict[str, _Place] = {}
        hidden: set[str] = set()
        for name in names:
            stem = name.removesuffix(_BLOCKS)
            if stem != name:
                self._add(stem)
                hidden |= {name, stem + _SCALES}
        self._names = (names - hidden) | self._places.keys()

    def _add(self, stem: str) -> None:
        prefix, _, last = stem.rpartition(".")
        shape = self._inner.entry(stem + _BLOCKS).shape
        if len(shape) != 4:
            raise self._inner.error(
                stem + _BLOCKS, f"has shape {list(shape)}; it must have 4 sizes"
            )
        parts = {last: slice(None)}
        if last == "gate_up_proj":
            parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for expert in range(shape[0]):
            for part, rows in parts.items():
                self._places[f"{prefix}.{expert}.{part}.weight"] = _Place(stem, expert, rows)

    def names(self) -> Iterable[str]:
        return self._names

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        place = self._places.get(name)
        if place is None:
            return self._inner.read(name, shape)
        blocks = self._bytes(place.stem + _BLOCKS, 4)[place.expert, place.rows]
        scales = self._bytes(place.stem + _SCALES, 3)
        if place.expert >= len(scales):
            raise self._wrong_scales(place, scales)
        own = scales[place.expert, place.rows]
        rows, groups, size = blocks.shape
        if size != _HALF or (rows, groups * BLOCK) != tuple(shape):
            raise self._inner.error(
                place.stem + _BLOCKS,
                f"has blocks of {size} bytes, {groups} for each of {rows} rows of {name}; the "
                f"model's config asks for {list(shape)}",
            )
        if own.shape != (rows, groups):
            raise self._wrong_scales(place, scales)
        if (own == _NO_NUMBER).any():
            raise self._inner.error(place.stem + _SCALES, "has values that are not numbers")
        return StoredTensor(name, "MXFP4", tuple(shape), as_gguf_blocks(blocks, own))

    def _bytes(self, name: str, num_dims: int) -> NDArray[np.uint8]:
        if name not in self._inner.names():
            raise self._inner.error(name, "is missing")
        entry = self._inner.entry(name)
        if entry.dtype != "U8" or len(entry.shape) != num_dims:
            raise self._inner.error(
                name,
                f"is {entry.dtype} {list(entry.shape)}; it must be U8 with {num_dims} sizes",
            )
        return self._inner.data(name).reshape(entry.shape)

    def _wrong_scales(self, place: _Place, scales: NDArray[np.uint8]) -> ModelError:
        blocks = self._inner.entry(place.stem + _BLOCKS).shape
        return self._inner.error(
            place.stem + _SCALES,
            f"has shape {list(scales.shape)} for blocks of {list(blocks)}",
        )

    @property
    def total_bytes(self) -> int:
        return self._inner.total_bytes


def as_gguf_blocks(values: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[rows, groups, 16] whose bytes hold neighbours, the first in the low bits, and [rows, groups]
    as blocks of a scale and 16 bytes, whose bytes hold values that are 16 apart."""
    blocks = np.empty((*scales.shape, 1 + _HALF), np.uint8)
    blocks[..., 0] = scales
    first, second = values[..., : _HALF // 2], values[..., _HALF // 2 :]
    blocks[..., 1::2] = first & 15 | second << 4
    blocks[..., 2::2] = first >> 4 | second & 240
    return blocks.reshape(-1)
