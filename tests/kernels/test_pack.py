"""Packed weights give back what was packed, whatever the shape, part by part and permuted."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels.harness import bf16, raw

RNG = np.random.default_rng(2)
TEAM = _native.Team(2)


def as_dtype(dtype: str, matrix: np.ndarray) -> np.ndarray:
    return matrix if dtype == "f32" else bf16(matrix)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 2), (17, 3), (33, 600), (100, 257)])
def test_round_trip(dtype: str, shape: tuple[int, int]) -> None:
    matrix = RNG.standard_normal(shape).astype(np.float32)
    packed = _native.Packed(*shape, dtype)
    packed.pack(TEAM, 0, raw(matrix), "F32", shape[0])
    np.testing.assert_array_equal(packed.unpack(), as_dtype(dtype, matrix))
    rows, cols = -(-shape[0] // 16) * 16, -(-shape[1] // 2) * 2
    assert packed.nbytes == rows * cols * (4 if dtype == "f32" else 2)
    assert (packed.rows, packed.cols, packed.dtype) == (*shape, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_parts_that_end_within_a_panel(dtype: str) -> None:
    matrix = RNG.standard_normal((60, 40)).astype(np.float32)
    packed = _native.Packed(60, 40, dtype)
    for start, end in [(21, 60), (0, 5), (5, 21)]:
        packed.pack(TEAM, start, raw(matrix[start:end]), "F32", end - start)
    np.testing.assert_array_equal(packed.unpack(), as_dtype(dtype, matrix))


def test_row_map_names_the_stored_row() -> None:
    matrix = RNG.standard_normal((24, 6)).astype(np.float32)
    order = RNG.permutation(24).astype(np.int32)
    packed = _native.Packed(30, 6, "f32")
    packed.pack(TEAM, 4, raw(matrix), "F32", 24, order)
    np.testing.assert_array_equal(packed.unpack()[4:28], matrix[order])
    np.testing.assert_array_equal(packed.unpack()[[0, 29]], 0)


def test_half_precision_sources() -> None:
    matrix = RNG.standard_normal((20, 31)).astype(np.float16)
    packed = _native.Packed(20, 31, "f32")
    packed.pack(TEAM, 0, matrix.view(np.uint8).reshape(-1), "F16", 20)
    np.testing.assert_array_equal(packed.unpack(), matrix.astype(np.float32))
    rounded = bf16(RNG.standard_normal((20, 31)).astype(np.float32))
    stored = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    packed.pack(TEAM, 0, stored.view(np.uint8).reshape(-1), "BF16", 20)
    np.testing.assert_array_equal(packed.unpack(), rounded)


def test_quantised_rows_are_dequantised_on_the_way() -> None:
    scales = RNG.uniform(0.01, 0.1, (5, 11)).astype(np.float16)
    values = RNG.integers(-127, 128, (5, 11, 32)).astype(np.int8)
    blocks = np.concatenate([scales[..., None].view(np.uint8), values.view(np.uint8)], axis=-1)
    packed = _native.Packed(5, 352, "f32")
    packed.pack(TEAM, 0, np.ascontiguousarray(blocks).reshape(-1), "Q8_0", 5)
    expected = values * scales[..., None].astype(np.float32)
    np.testing.assert_array_equal(packed.unpack(), expected.reshape(5, 352))


def test_read_only_data_is_enough() -> None:
    data = raw(np.ones((2, 2), np.float32))
    data.flags.writeable = False
    packed = _native.Packed(2, 2, "bf16")
    packed.pack(TEAM, 0, data, "F32", 2)
    np.testing.assert_array_equal(packed.unpack(), 1)


def test_sizes_that_do_not_agree_are_refused() -> None:
    packed = _native.Packed(4, 6, "bf16")
    data = raw(np.ones((4, 6), np.float32))

    def refuse(message: str, *args: object) -> None:
        with pytest.raises(ValueError, match=message):
            packed.pack(TEAM, *args)  # type: ignore[arg-type]  # wrong on purpose

    refuse("data has 96 bytes, but 3 rows of 6 columns take 72", 0, data, "F32", 3)
    refuse("rows 1 to 5 of a matrix of 4 rows", 1, data, "F32", 4)
    refuse("rows -1 to 3", -1, data, "F32", 4)
    refuse("stored dtype 'F8' is not known", 0, data, "F8", 4)
    refuse("6 columns, but this type stores blocks of 32 values", 0, data, "Q4_0", 4)
    refuse("row_map has 2 entries for 4 rows", 0, data, "F32", 4, np.zeros(2, np.int32))
    refuse("row_map names stored row 4 of 4", 0, data, "F32", 4, np.full(4, 4, np.int32))
    with pytest.raises(ValueError, match="rows is 0"):
        _native.Packed(0, 6, "bf16")
    with pytest.raises(ValueError, match="dtype 'int4' is not known; there are: f32, bf16"):
        _native.Packed(1, 6, "int4")
