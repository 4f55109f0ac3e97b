"""What the kernels' packing does not read is rewritten, and keeps its values."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.native.stored_form import form_of, in_form
from octavo_engine.weights.checkpoint import Scales, StoredTensor


def float8(columns: int, scales: Scales | None) -> StoredTensor:
    codes = np.random.default_rng(1).integers(0, 127, (40, columns), np.uint8)
    codes |= np.random.default_rng(2).integers(0, 2, codes.shape, np.uint8) << 7
    return StoredTensor("w", "F8_E4M3", codes.shape, codes.reshape(-1), scales=scales)


def factors(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(3).uniform(0.5, 2, (rows, columns)).astype(np.float32)


@pytest.mark.parametrize(
    "stored",
    [
        float8(160, None),
        float8(160, Scales(factors(1, 1), 40, 160)),
        float8(160, Scales(factors(40, 1), 1, 160)),
        float8(160, Scales(factors(2, 2), 32, 128)),
        float8(160, Scales(factors(1, 1), 128, 128 * 2)),
    ],
    ids=["plain", "matrix", "rows", "blocks", "one block larger than it"],
)
def test_eight_bit_floats_become_blocks_of_the_same_values(stored: StoredTensor) -> None:
    assert form_of(stored) == "F8_E4M3"
    form = in_form(stored)
    values = _native.dequantize(form.data, form.dtype, 40 * 160).reshape(40, 160)
    np.testing.assert_array_equal(values, to_float32(stored))


@pytest.mark.parametrize("columns", [40, 96])
def test_what_fits_no_block_becomes_numbers(columns: int) -> None:
    stored = float8(columns, Scales(factors(2, columns // 8), 32, 8))
    assert form_of(stored) == "F32"
    form = in_form(stored)
    values = form.data.view(np.float32).reshape(40, columns)
    np.testing.assert_array_equal(values, to_float32(stored))


def test_columns_come_back_in_their_order() -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    order = np.array([2, 0, 3, 1], np.int32)
    stored = StoredTensor("w", "F32", (3, 4), numbers.view(np.uint8).reshape(-1), column_map=order)
    assert form_of(stored) == "F32"
    values = in_form(stored).data.view(np.float32).reshape(3, 4)
    np.testing.assert_array_equal(values, numbers[:, order])


def test_what_the_kernels_read_is_not_copied() -> None:
    stored = StoredTensor("w", "BF16", (2, 2), np.zeros(8, np.uint8))
    assert in_form(stored) is stored
