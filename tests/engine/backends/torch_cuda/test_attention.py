"""Paged attention against the float32 reference, for every mix of prompts and single tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.device_step import cut_tiles
from octavo_engine.backends.torch.operands import LayerKV
from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.torch.reference import PagedKV, ReferenceOps
from octavo_engine.backends.torch.triton import attention
from octavo_engine.backends.torch.triton.attention import (
    PARTS_BYTES,
    Tile,
    attend,
    choose_tile,
    count_splits,
    plan_parts,
)
from octavo_engine.backends.torch.triton.heads import turn_and_store
from octavo_engine.caches import KVSpec, one_group
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.ops import AttentionSpec, QueryTemperature, Rope
from tests.engine.backends.torch_cuda.steps import NUM_BLOCKS, make_step, on_device, pad

MIXED = [(0, 3), (37, 1), (13, 9), (0, 1), (30, 4)]
DECODE = [(40, 1), (0, 1), (100, 1)]


def make_spec(**changes) -> AttentionSpec:
    settings = {
        "layer": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 0.25,
    }  # fmt: skip
    return AttentionSpec(**(settings | changes))


class Paged:
    """A cache of random numbers where sequences have their tokens, and of NaN everywhere else."""

    def __init__(self, sequences, spec, device, dtype=torch.float32, *, seed=0) -> None:
        self.step = make_step(sequences, seed=seed)
        self.spec = spec
        rng = torch.Generator().manual_seed(seed)
        shape = (NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        kv = torch.full((2, *shape), torch.nan)
        for index, (context, _) in enumerate(sequences):
            first = 0 if spec.window is None else max(0, context + 1 - spec.window)
            for position in range(first, context):
                block = self.step.block_tables[0, self.step.rows[index], position // BLOCK_SIZE]
                value = torch.randn((2, *shape[2:]), generator=rng)
                kv[:, block, position % BLOCK_SIZE] = value
        self.kv = kv.to(device, dtype)
        columns = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = torch.randn((len(self.step.token_ids), columns), generator=rng).to(device, dtype)

    def reference(self) -> torch.Tensor:
        """In float32 on the host, from the values as they were rounded."""
        spec = on_host(self.spec)
        layout = one_group([KVSpec(spec.num_kv_heads, spec.head_dim)])
        paged = PagedKV(layout, NUM_BLOCKS, torch.float32)
        paged.layers[0][:] = self.kv.float().cpu()
        storage = None if self.kv.dtype == torch.float32 else self.kv.dtype
        ops = ReferenceOps(self.step, paged, Precision(storage=storage))
        result = ops.attention(self.qkv.float().cpu(), spec)
        self.expected_kv = paged.layers[0]
        return result


def on_host(spec: AttentionSpec) -> AttentionSpec:
    norms = {"q_norm": spec.q_norm, "k_norm": spec.k_norm, "sinks": spec.sinks}
    there = {name: norm.cpu() for name, norm in norms.items() if norm is not None}
    return dataclasses.replace(spec, **there)


def cos_sin(rope: Rope | None, device: torch.device) -> torch.Tensor | None:
    if rope is None:
        return None
    angles = torch.arange(256)[:, None] * torch.from_numpy(rope.inv_freq)
    return (torch.cat([angles.cos(), angles.sin()], 1) * rope.attention_factor).to(device)


def slopes(spec: AttentionSpec, device: torch.device) -> torch.Tensor | None:
    return None if spec.alibi is None else torch.from_numpy(spec.alibi).to(device)


def run(paged: Paged, tile: Tile, num_splits: int = 1, split_tokens: int = 0) -> torch.Tensor:
    spec = paged.spec
    tokens_per_tile = tile.block_m * spec.num_kv_heads // spec.num_heads
    tiles = cut_tiles(paged.step.seq_starts, tokens_per_tile)
    step = on_device(paged.step, paged.kv.device, tiles)
    k, v = paged.kv.unbind()
    kv = LayerKV(k, v)
    angles = cos_sin(spec.rope, paged.kv.device)
    q = turn_and_store(paged.qkv, angles, kv, step, spec)
    result = attend(
        q, kv, step, spec,
        tile=tile, num_splits=num_splits, split_tokens=split_tokens,
        alibi=slopes(spec, q.device),
    )  # fmt: skip
    return result.float().cpu()


def inverse_powers(base: float, dim: int):
    return (1 / base ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


ROPE = Rope(inverse_powers(10000, 16))
PARTIAL = Rope(inverse_powers(500, 8), attention_factor=1.25)
SPECS = {
    "plain": make_spec(),
    "rope": make_spec(rope=ROPE),
    "part of a head turns": make_spec(rope=PARTIAL),
    "window": make_spec(rope=ROPE, window=9),
    "soft cap": make_spec(soft_cap=2.0),
    "norms": make_spec(rope=ROPE, q_norm=torch.rand(16) + 0.5, k_norm=torch.rand(16) + 0.5),
    "one norm": make_spec(k_norm=torch.rand(16) + 0.5),
    "one group": make_spec(num_heads=6, num_kv_heads=1),
    "three to one": make_spec(num_heads=6, num_kv_heads=2, window=20),
    "odd head": make_spec(head_dim=24, num_heads=3, num_kv_heads=3),
    "sinks": make_spec(rope=ROPE, sinks=torch.tensor([-1.0, 0.5, 3.0, -torch.inf])),
    "sinks and window": make_spec(window=9, sinks=torch.tensor([90.0, 0.5, -300.0, 1.0])),
    "chunks": make_spec(rope=ROPE, window=12, is_chunked=True),
    "linear biases": make_spec(
        num_heads=6, num_kv_heads=2, alibi=np.array([1, 0.5, 0.3, 0.2, 0.1, 0], np.float32)
    ),
    "norms last": make_spec(
        rope=PARTIAL, norm_after_rope=True, q_norm=torch.rand(16) + 0.5, k_norm=torch.rand(16)
    ),
    "warm queries": make_spec(temperature=QueryTemperature(floor=7.0, scale=0.4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_any_mix_of_prompts_and_single_tokens_equals_the_reference(name, device):
    paged = Paged(MIXED, to_device(SPECS[name], device), device)
    expected = paged.reference()
    result = run(paged, Tile(block_m=16, block_n=32, num_warps=4, num_stages=1))
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(
        paged.kv.cpu(), paged.expected_kv, rtol=1e-5, atol=1e-5, equal_nan=True
    )


def to_device(spec: AttentionSpec, device: torch.device) -> AttentionSpec:
    norms = {
        name: getattr(spec, name).to(device)
        for name in ("q_norm", "k_norm", "sinks")
        if getattr(spec, name) is not None
    }
    return dataclasses.replace(spec, **norms)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("num_splits", "split_tokens"), [(3, 0), (7, 0), (4, 32)])
def test_a_walk_split_among_programs_gives_the_same(num_splits, split_tokens, window, device):
    paged = Paged(DECODE, make_spec(window=window), device)
    expected = paged.reference()
    tile = Tile(block_m=16, block_n=16, num_warps=4, num_stages=1)
    result = run(paged, tile, num_splits, split_tokens)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "dtype",
    # The interpreter multiplies bf16 as if it were whole numbers.
    [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_sixteen_bits_stay_close_to_the_reference(dtype, device):
    paged = Paged(MIXED, make_spec(rope=ROPE), device, dtype)
    expected = paged.reference()
    result = run(paged, Tile(block_m=32, block_n=32, num_warps=4, num_stages=1))
    error = (result - expected).norm() / expected.norm()
    assert error < 1e-2


@pytest.mark.usefixtures("row_by_row")
def test_fixed_cuts_make_a_token_independent_of_its_company(device):
    spec = make_spec(window=50)
    tile = Tile(block_m=16, block_n=16, num_warps=4, num_stages=1)
    whole = Paged([(70, 6)], spec, device)
    together = run(whole, tile, num_splits=3, split_tokens=32)
    alone = Paged([(75, 1)], spec, device)
    alone.step.block_tables[:] = 0
    alone.step.block_tables[0, alone.step.rows[0]] = whole.step.block_tables[0, whole.step.rows[0]]
    alone.step.slots[:] = whole.step.slots[:, -1:]
    alone.kv, alone.qkv = whole.kv, whole.qkv[-1:].clone()
    assert torch.equal(run(alone, tile, num_splits=5, split_tokens=32)[0], together[-1])


@pytest.mark.slow
@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("sequences", [MIXED, DECODE])
def test_tiles_one_after_the_other_give_the_bits_of_all_at_once(sequences, device, monkeypatch):
    """Their parts take no more memory than they may, and a tile's at least."""
    paged = Paged(sequences, make_spec(), device)
    tile = Tile(block_m=16, block_n=16, num_warps=4, num_stages=1)
    together = run(paged, tile, num_splits=4, split_tokens=32)
    sizes: list[int] = []
    new_empty = torch.Tensor.new_empty

    def noted(self, *args, **kwargs):
        made = new_empty(self, *args, **kwargs)
        sizes.append(made.numel() * 4)
        return made

    for most in (3 * 2 * 4 * 16 * 18 * 4, 1):  # three tiles' parts; less than one's
        monkeypatch.setattr(attention, "PARTS_BYTES", most)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", noted)
            result = run(paged, tile, num_splits=4, split_tokens=32)
        assert torch.equal(result, together)
        assert max(sizes) <= max(most, 2 * 4 * 16 * 18 * 4)
        sizes.clear()


def test_parts_of_a_long_context_take_a_bounded_part_of_memory():
    """Prompts of an 8B model at 131,072 tokens: of all tiles at once they would take 21 GB."""
    size = {"num_kv_heads": 8, "num_splits": 128, "head_dim": 128}
    prompts = plan_parts(num_tiles=320, part_rows=128, **size)
    assert prompts.num_tiles * 8 * 128 * 128 == prompts.num_rows
    assert PARTS_BYTES // 2 < prompts.num_bytes <= PARTS_BYTES
    decode = plan_parts(num_tiles=256, part_rows=4, **size)
    assert decode.num_tiles > 100 and decode.num_bytes <= PARTS_BYTES
    assert plan_parts(num_tiles=9, part_rows=4, **size | {"num_splits": 1}).num_bytes == 0
    assert plan_parts(num_tiles=9, part_rows=128, **size | {"num_splits": 2048}).num_tiles == 1


@pytest.mark.parametrize("name", SPECS)
def test_the_plain_twin_equals_the_reference(name, device):
    spec = to_device(SPECS[name], device)
    paged = Paged(MIXED, spec, device)
    expected = paged.reference()
    kernels = PlainKernels()
    step = on_device(paged.step, device, cut_tiles(paged.step.seq_starts, 16))
    k, v = paged.kv.unbind()
    kv = LayerKV(k, v)
    angles = cos_sin(spec.rope, device)
    q = kernels.turn_and_store(paged.qkv, angles, kv, step, spec)
    result = kernels.attend(q, kv, step, spec)
    torch.testing.assert_close(result.cpu(), expected, rtol=2e-5, atol=2e-5)


def test_a_row_of_padding_writes_nothing_and_reads_nothing(device):
    spec = make_spec()
    paged = Paged([(20, 1)], spec, device)
    expected = paged.reference()
    pad(paged.step)
    paged.qkv = torch.cat([paged.qkv, paged.qkv])
    for num_splits in (1, 2):
        tile = Tile(block_m=16, block_n=16, num_warps=4, num_stages=1)
        result = run(paged, tile, num_splits=num_splits)
        torch.testing.assert_close(result[:1], expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(result[1], torch.zeros_like(result[1]))
    torch.testing.assert_close(paged.kv.cpu(), paged.expected_kv, equal_nan=True)


def test_tiles_are_as_wide_as_registers_allow():
    assert choose_tile(group=4, head_dim=128, itemsize=2) == Tile(128, 64, 8, 5)
    assert choose_tile(group=4, head_dim=256, itemsize=2).block_m == 64
    assert choose_tile(group=20, head_dim=64, itemsize=4).block_m == 32


@pytest.mark.parametrize(
    ("num_programs", "max_seq_len", "expected"),
    [(8, 100, 1), (8, 8192, 16), (64, 8192, 4), (8, 1024, 4), (2048, 8192, 1)],
)
def test_walks_are_split_while_processors_are_idle(num_programs, max_seq_len, expected):
    splits = count_splits(num_programs=num_programs, max_seq_len=max_seq_len, num_processors=132)
    assert splits == expected
