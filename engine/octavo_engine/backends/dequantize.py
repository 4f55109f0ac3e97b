"""A stored tensor as float32 numbers, for what is not packed: vectors, and the torch reference."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.weights.checkpoint import StoredTensor


def to_float32(stored: StoredTensor) -> NDArray[np.float32]:
    """The tensor's values in its own shape, rows in their own order, its offset added."""
    values = _decode(stored).reshape(stored.shape)
    if stored.scales is not None:
        factors, rows, columns = stored.scales
        whole = factors.repeat(rows, axis=0).repeat(columns, axis=1)
        values *= whole[: values.shape[0], : values.shape[1]]
    if stored.row_map is not None:
        values = values[stored.row_map]
    if stored.column_map is not None:
        values = values[:, stored.column_map]
    return values + np.float32(stored.offset) if stored.offset else values


def _decode(stored: StoredTensor) -> NDArray[np.float32]:
    # NOTE: plain formats need no extension, so that the reference can be a witness against it.
    data = np.ascontiguousarray(stored.data)
    match stored.dtype:
        case "F32":
            return data.view(np.float32).copy()
        case "F16":
            return data.view(np.float16).astype(np.float32)
        case "BF16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "F8_E4M3":
            return _e4m3_values()[data]
    from octavo_engine import _native

    return _native.dequantize(data, stored.dtype, math.prod(stored.shape))


@functools.cache
def _e4m3_values() -> NDArray[np.float32]:
    """Of each byte: a sign, four bits of exponent and three of mantissa; no infinities."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)
