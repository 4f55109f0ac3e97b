"""The KV cache's blocks: size, copying, poisoning. What attention writes: test_attention.py."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from octavo_engine import _native
from octavo_engine.backends.native.kv_format import FormatName, settle_kv_format
from octavo_engine.caches import KVSpec
from octavo_engine.config import KVCacheDType
from tests.kernels.harness import AttentionCase, PagedAttention, uniform_kv

FORMATS = get_args(FormatName)


def written_cache(kv_dtype: str) -> tuple[_native.KVCache, int]:
    """A cache and the block that holds a sequence's 16 tokens."""
    case = AttentionCase(kv_dtype=kv_dtype)
    rows = np.random.default_rng(1).standard_normal((16, case.qkv_cols)).astype(np.float32)
    run = PagedAttention(case, [rows], _native.Team(1))
    run.step([(0, 16)])
    return run.kv, int(run.block_tables[0, 0])


@pytest.mark.parametrize("kv_cache_dtype", get_args(KVCacheDType))
def test_bytes_per_block_are_what_python_says(kv_cache_dtype: KVCacheDType) -> None:
    kv_format = settle_kv_format(kv_cache_dtype, "bf16")
    kv = uniform_kv(3, 5, 2, 48, kv_format.name)
    assert kv.bytes_per_block == 3 * kv_format.bytes_of(KVSpec(2, 48))


def test_bytes_of_one_token() -> None:
    """48 numbers each of K and V for two heads, in 8 bits with a scale of two bytes for each."""
    sizes = {name: uniform_kv(1, 1, 2, 48, name).bytes_per_block / 16 for name in FORMATS}
    assert sizes == {
        "f32": 768, "bf16": 384, "int8": 200, "fp8_e4m3": 200, "fp8_e5m2": 200,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 6, 15, 16])
def test_copy_of_the_first_tokens(dtype: str, count: int) -> None:
    kv, source = written_cache(dtype)
    target = (source + 1) % 4
    kv.poison([target])
    kv.copy(np.array([[source, target, count]], np.int32))
    for copied, original in zip(kv.read(0, target), kv.read(0, source), strict=True):
        np.testing.assert_array_equal(copied[:, :count], original[:, :count])
        assert np.isnan(copied[:, count:]).all()
        assert np.isfinite(original).all()


def test_copies_run_in_order_and_in_all_layers() -> None:
    kv = uniform_kv(2, 3, 1, 16, "f32")
    kv.poison([0])
    kv.copy(np.array([[0, 1, 16], [1, 2, 4]], np.int32))
    for layer in range(2):
        for part in kv.read(layer, 2):
            assert np.isnan(part[:, :4]).all()
            np.testing.assert_array_equal(part[:, 4:], 0)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_poison_leaves_other_blocks_alone(dtype: str) -> None:
    kv, source = written_cache(dtype)
    kv.poison([b for b in range(4) if b != source])
    assert np.isfinite(kv.read(0, source)[0]).all()


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([[0, 3, 1]], "block 3 of a cache of 3 blocks"),
        ([[-1, 0, 1]], "block -1 of a cache"),
        ([[0, 1, 17]], "17 tokens of a block of 16"),
        ([[0, 1]], "copies has 2 columns; it must have 3"),
    ],
)
def test_bad_copies_are_refused(copies: list[list[int]], message: str) -> None:
    kv = uniform_kv(1, 3, 1, 16, "f32")
    with pytest.raises(ValueError, match=message):
        kv.copy(np.array(copies, np.int32))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1, 1, 16), "num_layers is 0"),
        ((1, 0, 1, 16), "num_blocks is 0"),
        ((1, 1, 1, 40), "head_dim is 40; it must be a multiple of 16"),
        ((60000, 100_000_000, 1000, 512), "more than any machine has"),
    ],
)
def test_bad_shapes_are_refused(shape: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        uniform_kv(*shape, "f32")
    with pytest.raises(ValueError, match="there are: f32, bf16, int8, fp8_e4m3, fp8_e5m2"):
        uniform_kv(1, 1, 1, 16, "fp4")
    with pytest.raises(ValueError, match="block 7 of a cache of 3"):
        uniform_kv(1, 3, 1, 16, "f32").poison([7])


# -- layers in groups


def test_layers_of_two_groups_share_regions_as_large_as_the_larger_part() -> None:
    kv = _native.KVCache(
        4, [(0, 0, 4, 32), (1, 0, 1, 16), (0, 1, 1, 16), (1, 1, 2, 64)], [0, 24], "f32"
    )
    assert kv.bytes_per_block == 2 * 16 * 4 * (4 * 32 + 2 * 64)
    assert [part.shape for part in kv.read(0, 3)] == [(4, 16, 32)] * 2
    assert [part.shape for part in kv.read(3, 3)] == [(2, 16, 64)] * 2
    kv.poison([2])
    assert all(np.isnan(part).all() for layer in range(4) for part in kv.read(layer, 2))
    assert all(np.isfinite(part).all() for layer in range(4) for part in kv.read(layer, 1))


@pytest.mark.parametrize(
    ("layers", "windows", "message"),
    [
        ([(0, 0, 1, 16), (0, 0, 1, 16)], [0], "two layers of group 0 lie in region 0"),
        ([(1, 0, 1, 16)], [0], "layer 0 is of group 1 of 1"),
        ([(0, 7, 1, 16)], [0], "layer 0 lies in region 7"),
        ([(0, 0, 1, 16)], [], "there must be a group"),
        ([(0, 0, 1, 16)], [-1], "a group's window is -1"),
    ],
)
def test_bad_groups_are_refused(
    layers: list[tuple[int, int, int, int]], windows: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _native.KVCache(3, layers, windows, "f32")
