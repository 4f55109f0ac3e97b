"""Matrices of 4-bit floats (e2m1) with scales for groups of columns: NVFP4 and MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.integer_blocks import BLOCK, nvfp4_blocks
from octavo_engine.weights.mxfp4 import as_gguf_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

_GROUP = 16  # columns that share a scale of NVFP4
_NO_NUMBER = 255


class Nvfp4:
    """A scale in e4m3 for each 16 columns, and one for the matrix: packed in the file's size."""

    stored_types: tuple[str, ...] = ("NVFP4",)

    def __init__(self, suffix: str, global_scale: str, *, divides: bool) -> None:
        self.suffix = suffix
        self.scale = global_scale
        self._divides = divides  # scales are divided by the matrix's own, else multiplied

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        packed = _packed(checkpoint, module + self.suffix, name, shape)
        rows, columns = shape
        if columns % BLOCK:
            raise checkpoint.error(
                name, f"has {columns} columns; NVFP4 is read of multiples of {BLOCK}"
            )
        scale_name = f"{module}.weight_scale"
        scales = checkpoint.array(scale_name, ("F8_E4M3",), 2)
        if scales.shape != (rows, columns // _GROUP):
            raise checkpoint.error(
                scale_name, f"has shape {list(scales.shape)} for {rows} x {columns} values"
            )
        if (scales & 127 == 127).any():
            raise checkpoint.error(scale_name, "has values that are not numbers")
        factor = self._global_scale(checkpoint, module)
        if self._divides:
            factor = 1 / factor
        return StoredTensor(name, "NVFP4", tuple(shape), nvfp4_blocks(packed, scales, factor))

    def _global_scale(self, checkpoint: SafetensorsCheckpoint, module: str) -> np.float32:
        name = module + self.scale
        values = checkpoint.numbers(name, len(checkpoint.entry(name).shape)).reshape(-1)
        if len(values) != 1 or not np.isfinite(values[0]) or values[0] <= 0:
            raise checkpoint.error(name, "must be one number above 0")
        return np.float32(values[0])


class Mxfp4:
    """A power of two for each 32 columns: as GGUF's MXFP4, in its size."""

    suffix = ".weight_packed"
    scale = ".weight_scale"
    stored_types: tuple[str, ...] = ("MXFP4",)

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        packed = _packed(checkpoint, module + self.suffix, name, shape)
        rows, columns = shape
        scales = checkpoint.array(module + self.scale, ("U8", "F8_E8M0"), 2)
        if scales.shape != (rows, columns // BLOCK) or columns % BLOCK:
            raise checkpoint.error(
                module + self.scale,
                f"has shape {list(scales.shape)} for {rows} x {columns} values",
            )
        if (scales == _NO_NUMBER).any():
            raise checkpoint.error(module + self.scale, "has values that are not numbers")
        blocks = packed.reshape(rows, -1, BLOCK // 2)
        return StoredTensor(name, "MXFP4", tuple(shape), as_gguf_blocks(blocks, scales))


def _packed(
    checkpoint: SafetensorsCheckpoint, stored: str, name: str, shape: tuple[int, ...]
) -> NDArray[np.uint8]:
    """[rows, columns / 2]: neighbours in a byte, the first in its low bits."""
    packed = checkpoint.array(stored, ("U8",), 2)
    if (len(packed), 2 * packed.shape[1]) != tuple(shape):
        raise checkpoint.error(
            stored,
            f"has shape {list(packed.shape)}, two values in a byte; the model's config asks for "
            f"{list(shape)} of {name}",
        )
    return packed
