"""Stored tensors in the forms that the kernels' packing reads; what it cannot read is rewritten."""

from __future__ import annotations

import dataclasses

import numpy as np

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.weights.checkpoint import Scales, StoredTensor
from octavo_engine.weights.integer_blocks import BLOCK, f8_e4m3_blocks


def form_of(stored: StoredTensor) -> str:
    """The type that `in_form` gives: the stored one, or F32 where columns must be reordered."""
    if stored.column_map is not None or (stored.dtype == "F8_E4M3" and not _has_blocks(stored)):
        return "F32"
    return stored.dtype


def rows_of(stored: StoredTensor, first: int, end: int) -> StoredTensor:
    """Some rows of a matrix. The others' bytes are not touched."""
    num_rows, columns = stored.shape
    if (first, end) == (0, num_rows):
        return stored
    data = stored.data.reshape(num_rows, -1)
    mapped = None if stored.row_map is None else stored.row_map[first:end]
    rows = data[first:end] if mapped is None else data[mapped]
    scales = stored.scales
    if scales is not None:
        which = np.arange(first, end) if mapped is None else mapped
        scales = Scales(scales.values[which // scales.rows], 1, scales.columns)
    return dataclasses.replace(
        stored, shape=(end - first, columns), data=rows.reshape(-1), row_map=None, scales=scales
    )


def in_form(stored: StoredTensor) -> StoredTensor:
    """A copy where it must be one: F8_E4M3 as blocks of 32 with their scale, or float32 numbers."""
    form = form_of(stored)
    if form == "F8_E4M3":
        return dataclasses.replace(stored, data=_blocks(stored), scales=None)
    if form == stored.dtype and stored.column_map is None:
        return stored
    data = np.ascontiguousarray(to_float32(stored)).view(np.uint8).reshape(-1)
    return StoredTensor(stored.name, "F32", stored.shape, data)


def _has_blocks(stored: StoredTensor) -> bool:
    columns = stored.shape[1]
    width = columns if stored.scales is None else stored.scales.columns
    return columns % BLOCK == 0 and (width % BLOCK == 0 or width >= columns)


def _blocks(stored: StoredTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    rows, columns = stored.shape
    scales = np.ones((rows, columns // BLOCK), np.float32)
    if stored.scales is not None:
        factors, height, width = stored.scales
        by_row = factors.repeat(height, axis=0)[:rows]
        scales *= by_row.repeat(max(width // BLOCK, 1), axis=1)[:, : columns // BLOCK]
    return f8_e4m3_blocks(stored.data.reshape(rows, columns), scales)
