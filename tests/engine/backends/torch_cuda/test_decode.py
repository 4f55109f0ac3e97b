"""Attention of single tokens, their contexts cut into parts, against the float32 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.device_step import StepTiles, WalkCut, cut_walks
from octavo_engine.backends.torch.operands import LayerKV
from octavo_engine.backends.torch.triton import decode
from octavo_engine.backends.torch.triton.decode import WalkTile
from octavo_engine.backends.torch.triton.heads import turn_and_store
from tests.engine.backends.torch_cuda.steps import on_device
from tests.engine.backends.torch_cuda.test_attention import (
    SPECS,
    Paged,
    cos_sin,
    make_spec,
    slopes,
    to_device,
)

pytestmark = pytest.mark.slow
LENGTHS = [(40, 1), (0, 1), (100, 1), (15, 1), (127, 1)]
TILE = WalkTile(block_n=16, num_warps=4, num_stages=1)


def in_parts(lengths: list[int], length: int) -> StepTiles:
    """Shorter parts than `cut_walks` makes, which would be one here."""
    tiles = [
        (index, start, min(start + length, total))
        for index, total in enumerate(lengths)
        for start in range(0, max(total, 1), length)
    ]
    return StepTiles(*(np.array(column, np.int32) for column in zip(*tiles, strict=True)))


def run(paged: Paged, length: int = 1000, tile: WalkTile = TILE):
    """The result, and what is left in the words that arrivals are counted in."""
    spec = paged.spec
    tiles = in_parts(paged.step.seq_lens.tolist(), length)
    step = on_device(paged.step, paged.kv.device, tiles, walks=WalkCut(50, spec.num_heads))
    k, v = paged.kv.unbind()
    kv = LayerKV(k, v)
    angles = cos_sin(spec.rope, paged.kv.device)
    q = turn_and_store(paged.qkv, angles, kv, step, spec)
    alibi = slopes(spec, q.device)
    result = decode.attend(q, kv, step, spec, tile=tile, alibi=alibi)
    return result.float().cpu(), step.arrivals


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("length", [1000, 32])
def test_single_tokens_equal_the_reference_whole_and_in_parts(name, length, device):
    paged = Paged(LENGTHS, to_device(SPECS[name], device), device)
    expected = paged.reference()
    result, arrivals = run(paged, length)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)
    assert not arrivals.any()  # the next layer finds them as this one did


def test_more_parts_than_are_added_at_once(device, monkeypatch):
    monkeypatch.setattr(decode, "JOINED_VALUES", 64)
    paged = Paged(LENGTHS, make_spec(), device)
    expected = paged.reference()
    result, _ = run(paged, 16)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_sixteen_bits_stay_close_to_the_reference(dtype, device):
    paged = Paged(LENGTHS, make_spec(), device, dtype)
    expected = paged.reference()
    for length in (1000, 32):
        result, _ = run(paged, length)
        assert (result - expected).norm() / expected.norm() < 1e-2


def test_who_arrives_last_changes_no_bit(device):
    paged = Paged(LENGTHS, make_spec(), device)
    first, _ = run(paged, 32)
    for _ in range(5):
        assert torch.equal(run(paged, 32)[0], first)


def test_parts_cover_each_context_once_and_are_no_more_than_there_is_room_for():
    rng = np.random.default_rng(0)
    for _ in range(300):
        longest, count = int(rng.choice([50, 500, 20_000])), int(rng.integers(1, 70))
        lengths = rng.integers(1, longest, count, dtype=np.int32)
        spare = int(rng.integers(1, 40))
        tiles = cut_walks(lengths, spare)
        assert tiles.ends is not None
        assert len(tiles.seqs) <= len(lengths) + spare
        covered = np.zeros_like(lengths)
        for sequence, start, end in zip(tiles.seqs, tiles.starts, tiles.ends, strict=True):
            assert start == covered[sequence] < end  # side by side, in their order
            covered[sequence] = end
        assert covered.tolist() == lengths.tolist()
        assert (np.diff(tiles.seqs) >= 0).all()


def test_a_long_context_among_short_ones_is_shared_and_short_ones_are_whole():
    lengths = np.array([300] * 63 + [16_000], np.int32)
    counts = np.bincount(cut_walks(lengths, 33).seqs)
    assert counts[:63].tolist() == [1] * 63
    assert counts[63] > 10
    assert len(cut_walks(lengths, 0).seqs) == 64
