"""Matrices of 4-bit floats (e2m1) with scales for groups of columns: NVFP4 and MXFP4."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.integer_blocks import BLOCK
from octavo_engine.weights.mxfp4 import as_gguf_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

logger = logging.getLogger(__name__)

_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_LEVELS, -_LEVELS])  # by their four bits
_GROUP = 16  # columns that share a scale of NVFP4
_NO_NUMBER = 255


class Nvfp4:
    """A scale in e4m3 for each 16 columns, and one for the matrix. No packed kernel has such
    groups, so matrices are widened; the engine's dtype is what they are kept in."""

    def __init__(self, suffix: str, global_scale: str, *, divides: bool) -> None:
        self.suffix = suffix
        self.scale = global_scale
        self._divides = divides  # scales are divided by the matrix's own, else multiplied

    def read(
        self, checkpoint: SafetensorsCheckpoint, name: str, module: str, shape: tuple[int, ...]
    ) -> StoredTensor:
        packed = _packed(checkpoint, module + self.suffix, name, shape)
        rows, columns = shape
        scale_name = f"{module}.weight_scale"
        bits = checkpoint.array(scale_name, ("F8_E4M3",), 2)
        if bits.shape != (rows, columns // _GROUP) or columns % _GROUP:
            raise checkpoint.error(
                scale_name, f"has shape {list(bits.shape)} for {rows} x {columns} values"
            )
        if (bits & 127 == 127).any():
            raise checkpoint.error(scale_name, "has values that are not numbers")
        factor = self._global_scale(checkpoint, module)
        scales = _e4m3(bits) / factor if self._divides else _e4m3(bits) * factor
        values = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1)
        whole = values.reshape(rows, -1, _GROUP) * scales[..., None]
        return StoredTensor(name, "F32", tuple(shape), whole.view(np.uint8).reshape(-1))

    def _global_scale(self, checkpoint: SafetensorsCheckpoint, module: str) -> np.float32:
        name = module + self.scale
        values = checkpoint.numbers(name, len(checkpoint.entry(name).shape)).reshape(-1)
        if len(values) != 1 or not np.isfinite(values[0]) or values[0] <= 0:
            raise checkpoint.error(name, "must be one number above 0")
        return np.float32(values[0])

    def log_size(self, checkpoint: SafetensorsCheckpoint, modules: Sequence[str]) -> None:
        """A line that says that matrices grow."""
        packed = sum(math.prod(checkpoint.entry(name + self.suffix).shape) for name in modules)
        logger.info(
            "%d NVFP4 matrices are widened: they take %.1f MiB in 16 bits in place of %.1f MiB; "
            "--quantization int4 keeps them in 4 bits, rounded again",
            len(modules), 4 * packed / 2**20, packed * 1.125 / 2**20,
        )  # fmt: skip


class Mxfp4:
    """A power of two for each 32 columns: as GGUF's MXFP4, in its size."""

    suffix = ".weight_packed"
    scale = ".weight_scale"

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


def _e4m3(bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _E4M3[bits]


def _e4m3_table() -> NDArray[np.float32]:
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    return np.where(bits < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
