"""Stored formats to float32, bit by bit as the `gguf` package computes them."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from octavo_engine import _native

PLAIN = ("F32", "F16", "BF16")
QUANTISED = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
NUM_BLOCKS = 400


def stored(dtype: str, seed: int = 7) -> np.ndarray:
    """Random bytes: every bit pattern of scales and quants, subnormals, infinities and NaN too."""
    _, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, NUM_BLOCKS * num_bytes, dtype=np.uint8)


def truth(dtype: str, data: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf_dequantize(data, GGMLQuantizationType[dtype]).ravel()


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    is_nan = np.isnan(expected)  # which NaN it is does not matter
    assert (np.isnan(got) == is_nan).all()
    assert (got.view(np.uint32)[~is_nan] == expected.view(np.uint32)[~is_nan]).all()


@pytest.mark.parametrize("dtype", PLAIN + QUANTISED)
def test_random_blocks_give_the_bits_of_the_gguf_package(dtype: str) -> None:
    data = stored(dtype)
    expected = truth(dtype, data)
    got = _native.dequantize(data, dtype, expected.size)
    assert got.dtype == np.float32 and np.isfinite(got).mean() > 0.5
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_pattern(dtype: str) -> None:
    data = np.arange(65536, dtype=np.uint16).view(np.uint8)
    assert_same_bits(_native.dequantize(data, dtype, 65536), truth(dtype, data))


@pytest.mark.parametrize("dtype", ["Q4_1", "Q6_K", "F32"])
def test_data_may_lie_at_any_address(dtype: str) -> None:
    data = stored(dtype)
    shifted = np.zeros(data.size + 1, np.uint8)
    shifted[1:] = data
    expected = truth(dtype, data)
    assert_same_bits(_native.dequantize(shifted[1:], dtype, expected.size), expected)


def test_read_only_memory_is_read() -> None:
    data = stored("Q8_0")
    data.flags.writeable = False
    assert_same_bits(_native.dequantize(data, "Q8_0", 32 * NUM_BLOCKS), truth("Q8_0", data))


def test_nothing_is_nothing() -> None:
    assert _native.dequantize(np.empty(0, np.uint8), "Q4_K", 0).shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "num_values", "message"),
    [
        ("Q9_9", 34, 32, "'Q9_9' is not known"),
        ("Q8_0", 34, 31, "31 values are not whole blocks of 32"),
        ("Q8_0", 33, 32, "33 bytes, but 32 values take 34"),
        ("F32", 4, -1, "-1 values are not whole"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(
    dtype: str, num_bytes: int, num_values: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _native.dequantize(np.zeros(num_bytes, np.uint8), dtype, num_values)
