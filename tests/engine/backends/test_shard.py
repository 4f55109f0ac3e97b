"""What each rank has: every row and every head once, at places that the kernels can begin at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_engine import _native
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.native.packing import PANEL_ROWS
from octavo_engine.backends.native.shard import Shard, cut_heads, cut_rows, pieces_of
from octavo_engine.backends.native.stored_form import rows_of
from octavo_engine.errors import ConfigError
from octavo_engine.weights.checkpoint import Scales, StoredTensor
from tests.engine.models.tiny import tiny_model

SIZES = st.integers(1, 9)


@given(total=st.integers(1, 400), size=SIZES, of_halves=st.booleans())
def test_rows_are_had_once_or_by_all(total: int, size: int, of_halves: bool) -> None:
    cuts = [cut_rows(total, Shard(rank, size), of_halves=of_halves) for rank in range(size)]
    if cuts[0].is_whole:
        assert all(cut.is_whole for cut in cuts)
        assert size == 1 or total <= (size - 1) * PANEL_ROWS * (1 + of_halves)
        return
    rows = sorted(row for cut in cuts for first, end in cut.ranges for row in range(first, end))
    assert rows == list(range(total))
    assert all(first % PANEL_ROWS == 0 for cut in cuts for first, _ in cut.ranges)
    lengths = [cut.ranges[0][1] - cut.ranges[0][0] for cut in cuts]
    assert min(lengths) > 0
    assert max(lengths) - min(lengths) < 2 * PANEL_ROWS


@given(sizes=st.lists(st.integers(1, 70), min_size=1, max_size=4), rank=st.integers(0, 2))
def test_pieces_are_the_cuts_rows_of_each_matrix(sizes: list[int], rank: int) -> None:
    cut = cut_rows(sum(sizes), Shard(rank, 3), of_halves=False)
    starts = np.cumsum([0, *sizes])
    rows = [
        starts[matrix] + row
        for matrix, first, end in pieces_of(cut, sizes)
        for row in range(first, end)
    ]
    assert rows == [row for first, end in cut.ranges for row in range(first, end)]


@given(num_kv_heads=st.integers(1, 9), group=st.integers(1, 9), size=SIZES)
def test_heads_are_computed_once_beside_their_kv_heads(
    num_kv_heads: int, group: int, size: int
) -> None:
    num_heads = num_kv_heads * group
    if size > num_heads:
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} is more than"):
            cut_heads(num_heads, num_kv_heads, Shard(0, size))
        return
    shards = [cut_heads(num_heads, num_kv_heads, Shard(rank, size)) for rank in range(size)]
    heads = [h for s in shards for h in range(s.first_head, s.first_head + s.num_heads)]
    assert heads == list(range(num_heads))
    for shard in shards:
        assert shard.num_heads % shard.num_kv_heads == 0
        own_group = shard.num_heads // shard.num_kv_heads
        for index in range(shard.num_heads):
            kv_head = shard.first_kv_head + index // own_group
            assert kv_head == (shard.first_head + index) // group
    assert sum(s.num_kv_heads for s in shards) == max(num_kv_heads, size)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_ranks_together_hold_the_matrix(quantization: str) -> None:
    checkpoint = tiny_model("llama").checkpoint()
    team = _native.Team(1)
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]

    def load(shard: Shard) -> _native.Packed:
        loader = NativeLoader(checkpoint, team, "bf16", quantization=quantization, shard=shard)  # type: ignore[arg-type]
        width, hidden = (int(side) for side in checkpoint.read(f"{names[0]}.weight", SHAPE).shape)
        return loader.linear(names, hidden, [width, width]).weight

    whole = load(Shard()).unpack()
    found = np.full_like(whole, np.nan)
    for rank in range(2):
        packed = load(Shard(rank, 2))
        assert packed.nbytes < 0.7 * load(Shard()).nbytes
        ranges = cut_rows(len(whole), Shard(rank, 2), of_halves=True).ranges
        found[np.concatenate([np.arange(*each) for each in ranges])] = packed.unpack()
    np.testing.assert_array_equal(found, whole)


SHAPE = (96, 64)


def test_some_rows_of_a_permuted_and_scaled_matrix() -> None:
    rng = np.random.default_rng(1)
    stored = StoredTensor(
        "w",
        "F8_E4M3",
        (64, 32),
        rng.integers(0, 120, 64 * 32, dtype=np.uint8),
        row_map=rng.permutation(64).astype(np.int32),
        scales=Scales(rng.random((4, 1), np.float32), 16, 32),
    )
    plain = StoredTensor("w", "F32", (64, 32), rng.random(64 * 32, np.float32).view(np.uint8))
    for each in (stored, plain):
        part = rows_of(each, 19, 50)
        assert part.shape == (31, 32)
        np.testing.assert_array_equal(to_float32(part), to_float32(each)[19:50])
    assert rows_of(plain, 0, 64) is plain
