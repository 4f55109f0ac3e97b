"""Latent attention against the float32 reference: any mix, parts of contexts, NaN in the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.torch.device_step import WalkCut, cut_tiles
from octavo_engine.backends.torch.latent_kernels import LatentKernels
from octavo_engine.backends.torch.loader import TorchHeads
from octavo_engine.backends.torch.operands import LatentOperands
from octavo_engine.backends.torch.plain_latent import latent_attention
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.torch.reference import PagedKV, ReferenceOps
from octavo_engine.backends.torch.triton import attention, latent
from octavo_engine.backends.torch.triton.latent import LatentTile
from octavo_engine.caches import LatentSpec, one_group
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.models.latent_config import LatentConfig
from octavo_engine.ops import LatentAttentionSpec, Rope
from tests.engine.backends.torch_cuda.steps import NUM_BLOCKS, make_step, on_device, pad
from tests.engine.backends.torch_cuda.test_attention import DECODE, MIXED, cos_sin, inverse_powers
from tests.engine.backends.torch_cuda.test_decode import LENGTHS, in_parts

NOPE, VALUES = 24, 20
SPECS: dict[str, dict[str, Any]] = {
    "neighbours turn": {},
    "halves turn": {"turns_neighbours": False},
    "window": {"window": 9},
    "three heads": {"num_heads": 3},
    "odd rank": {"rank": 48},
}
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


def make_spec(device: torch.device, **changes) -> LatentAttentionSpec:
    settings: dict[str, Any] = {
        "layer": 0, "num_heads": 6, "nope_dim": NOPE, "rank": 32, "value_dim": VALUES,
        "rope": Rope(inverse_powers(500, 16), attention_factor=1.25), "scale": 0.2,
        "norm_eps": 1e-6, "turns_neighbours": True,
    }  # fmt: skip
    settings |= changes
    weight = torch.rand(settings["rank"], generator=torch.Generator().manual_seed(3)) + 0.5
    return LatentAttentionSpec(**settings, kv_norm=weight.to(device))


class Latents:
    """A cache of random numbers where sequences have their tokens, and of NaN everywhere else."""

    def __init__(self, sequences, spec, device, dtype=torch.float32) -> None:
        self.step, self.spec, self.device = make_step(sequences), spec, device
        rng = torch.Generator().manual_seed(1)
        dim = spec.rank + spec.rope_dim
        cache = torch.full((NUM_BLOCKS, BLOCK_SIZE, 1, dim), torch.nan)
        for index, (context, _) in enumerate(sequences):
            first = 0 if spec.window is None else max(0, context + 1 - spec.window)
            for position in range(first, context):
                block = self.step.block_tables[0, self.step.rows[index], position // BLOCK_SIZE]
                cache[block, position % BLOCK_SIZE] = torch.randn((1, dim), generator=rng)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng).to(device, dtype)

        count, heads = len(self.step.token_ids), spec.num_heads
        self.cache = cache.to(device, dtype)
        self.operands = (
            drawn(count, heads * (NOPE + spec.rope_dim)), drawn(count, dim),
            drawn(heads, spec.rank, NOPE) / 5, drawn(heads, VALUES, spec.rank) / 5,
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        """In float32 on the host, from the values as they were rounded."""
        layout = one_group([LatentSpec(self.spec.rank, self.spec.rope_dim)])
        paged = PagedKV(layout, NUM_BLOCKS, torch.float32)
        paged.layers[0][0] = self.cache.float().cpu()
        storage = None if self.cache.dtype == torch.float32 else self.cache.dtype
        ops = ReferenceOps(self.step, paged, Precision(storage=storage))
        q, kv, key_up, value_up = (operand.float().cpu() for operand in self.operands)
        spec = make_spec(torch.device("cpu"), **{
            name: getattr(self.spec, name)
            for name in ("num_heads", "rank", "window", "turns_neighbours")
        })  # fmt: skip
        result = ops.latent_attention(q, kv, TorchHeads(key_up), TorchHeads(value_up), spec)
        self.expected_cache = paged.layers[0][0]
        return result

    def run(self, tiles, tile: LatentTile, *, num_splits=1, split_tokens=0) -> torch.Tensor:
        q, kv, key_up, value_up = self.operands
        spec, walks = self.spec, WalkCut(50)
        step = on_device(self.step, self.device, tiles, walks=walks)
        angles = cos_sin(spec.rope, self.device)
        assert angles is not None
        turned = latent.store(q, kv, angles, self.cache, step, spec)
        heads = q.view(len(q), spec.num_heads, -1)[..., :NOPE]
        is_fixed = split_tokens > 0
        absorbed = latent.per_head(heads, key_up, batch_invariant=is_fixed)
        if step.is_decode:
            mixed = latent.walk(absorbed, turned, self.cache, step, spec, tile=tile)
        else:
            mixed = latent.attend(
                absorbed, turned, self.cache, step, spec, tile=tile,
                num_splits=num_splits, split_tokens=split_tokens,
            )  # fmt: skip
        result = latent.per_head(mixed, value_up, batch_invariant=is_fixed)
        return result.flatten(1).float().cpu()


def tile_of(spec: LatentAttentionSpec, *, group: int | None = None) -> LatentTile:
    return LatentTile(group or spec.num_heads, 16, 16, 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_any_mix_of_prompts_and_single_tokens_equals_the_reference(name, device):
    spec = make_spec(device, **SPECS[name])
    for group in (spec.num_heads, spec.num_heads // 3):
        paged, tile = Latents(MIXED, spec, device), tile_of(spec, group=group)
        expected = paged.reference()
        result = paged.run(cut_tiles(paged.step.seq_starts, tile.tokens_per_tile), tile)
        torch.testing.assert_close(result, expected, **CLOSE)
        torch.testing.assert_close(
            paged.cache.cpu(), paged.expected_cache, rtol=1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.slow
@pytest.mark.parametrize(("num_splits", "split_tokens"), [(3, 0), (4, 32)])
@pytest.mark.parametrize("name", ["neighbours turn", "window"])
def test_walks_split_among_programs_are_joined(name, num_splits, split_tokens, device, monkeypatch):
    spec = make_spec(device, **SPECS[name])
    for sequences in (MIXED, DECODE):
        paged, tile = Latents(sequences, spec, device), tile_of(spec)
        expected = paged.reference()
        tiles = cut_tiles(paged.step.seq_starts, tile.tokens_per_tile)
        for most in (attention.PARTS_BYTES, 1):  # all tiles at once, and one after the other
            monkeypatch.setattr(attention, "PARTS_BYTES", most)
            result = paged.run(tiles, tile, num_splits=num_splits, split_tokens=split_tokens)
            torch.testing.assert_close(result, expected, **CLOSE)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("length", [1000, 32])
def test_single_tokens_equal_the_reference_whole_and_in_parts(name, length, device, monkeypatch):
    monkeypatch.setattr(latent, "JOINED_PARTS", 2)  # fewer than there are
    spec = make_spec(device, **SPECS[name])
    paged = Latents(LENGTHS, spec, device)
    expected = paged.reference()
    tiles = in_parts(paged.step.seq_lens.tolist(), length)
    torch.testing.assert_close(paged.run(tiles, tile_of(spec)), expected, **CLOSE)


@pytest.mark.parametrize("name", SPECS)
def test_the_plain_twin_equals_the_reference(name, device):
    spec = make_spec(device, **SPECS[name])
    paged = Latents(MIXED, spec, device)
    expected = paged.reference()
    step = on_device(paged.step, device, cut_tiles(paged.step.seq_starts, 16))
    angles = cos_sin(spec.rope, device)
    assert angles is not None
    result = latent_attention(LatentOperands(*paged.operands, angles, paged.cache), step, spec)
    torch.testing.assert_close(result.cpu(), expected, **CLOSE)
    torch.testing.assert_close(
        paged.cache.cpu(), paged.expected_cache, rtol=1e-5, atol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_sixteen_bits_stay_close_to_the_reference(dtype, device):
    spec = make_spec(device)
    for sequences in (LENGTHS, MIXED):
        paged = Latents(sequences, spec, device, dtype)
        expected = paged.reference()
        tile = latent.choose_tile(num_heads=spec.num_heads, itemsize=2)
        if sequences is LENGTHS:
            tiles = in_parts(paged.step.seq_lens.tolist(), 64)
        else:
            tiles = cut_tiles(paged.step.seq_starts, tile.tokens_per_tile)
        result = paged.run(tiles, tile)
        limit = 1e-2 if dtype == torch.float16 else 3e-2
        assert (result - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize(
    ("num_heads", "group", "rows"), [(128, 32, 32), (16, 16, 16), (20, 20, 32), (96, 32, 32)]
)
def test_groups_of_heads_divide_all_heads(num_heads, group, rows):
    tile = latent.choose_tile(num_heads=num_heads, itemsize=2)
    assert (tile.group, tile.walk_rows) == (group, rows)
    assert tile.tokens_per_tile == 32 // group


def test_memory_of_a_layer_is_counted():
    config = LatentConfig(
        rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=None, turns_neighbours=True
    )
    limits = BackendLimits(max_tokens=1000, max_seqs=64, max_logit_rows=64, max_model_len=8192)
    options = {"num_processors": 132}
    usual = LatentKernels(config, torch.bfloat16, 128, split_tokens=0, **options)
    assert usual.walks.spare_parts == 33
    values = 1000 * 128 * (2 * 512 + 64 + 128) * 2
    parts = max((64 + 33) * 128, 2 * 132 * 32) * 514 * 4
    assert usual.workspace_bytes(limits) == values + parts
    fixed = LatentKernels(config, torch.bfloat16, 128, split_tokens=1024, **options)
    assert fixed.walks == WalkCut()
    assert values + (200 << 20) < fixed.workspace_bytes(limits) <= values + attention.PARTS_BYTES


def test_padding_reads_nothing_and_writes_nothing(device):
    spec = make_spec(device)
    paged = Latents([(20, 1)], spec, device)
    expected = paged.reference()
    pad(paged.step)
    q, kv, key_up, value_up = paged.operands
    paged.operands = torch.cat([q, q]), torch.cat([kv, kv]), key_up, value_up
    for tiles in (cut_tiles(paged.step.seq_starts, 2), in_parts([21, 0], 16)):
        result = paged.run(tiles, tile_of(spec))
        torch.testing.assert_close(result[:1], expected, **CLOSE)
        assert torch.equal(result[1], torch.zeros_like(result[1]))
    torch.testing.assert_close(
        paged.cache.cpu(), paged.expected_cache, rtol=1e-5, atol=1e-5, equal_nan=True
    )
