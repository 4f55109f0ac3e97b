"""Attention over whole texts, layer norms and pooling: Triton against plain torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from octavo_engine.backends.pooling import make_step
from octavo_engine.backends.torch.landing import HostMark
from octavo_engine.backends.torch.operands import NormWeights
from octavo_engine.backends.torch.text_kernels import PlainTextKernels
from octavo_engine.backends.torch.text_step import (
    TextBuffer,
    TextSizes,
    bucket_of,
    most_captured,
    text_buckets,
    token_buckets,
)
from octavo_engine.backends.torch.triton import texts as kernels
from octavo_engine.ops import AttentionSpec

pytestmark = pytest.mark.slow  # kernels in the interpreter

PLAIN = PlainTextKernels()
LENGTHS = [5, 33, 1, 16, 40, 17]
DTYPES = [torch.float32, torch.float16]


def close(dtype):
    return {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}


def steps_of(device, lengths, *, tokens_per_tile=16, bucket=None):
    """The step, with its lengths on the host too for plain kernels, and padded."""
    host = make_step([(list(range(n)), ()) for n in lengths], is_last=False)
    room = bucket or TextSizes(int(host.starts[-1]), len(lengths), 0)
    buffer = TextBuffer(
        max_tokens=room.tokens, max_texts=room.texts, tokens_per_tile=tokens_per_tile,
        device=device, make_mark=HostMark,
    )  # fmt: skip
    sizes = buffer.fill(host, bucket)
    return buffer.step(sizes, host), buffer.step(sizes, host if bucket is None else None)


def spec_of(heads=4, kv_heads=4, head_dim=16, **fields) -> AttentionSpec:
    return AttentionSpec(
        layer=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5,
        **{"is_causal": False, **fields},
    )  # fmt: skip


SPECS = {
    "both ways": spec_of(),
    "odd heads": spec_of(6, 2, 24),
    "one key head": spec_of(4, 1, 32),
    "a window both ways": spec_of(window=7),
    "causal": spec_of(4, 2, is_causal=True),
    "a causal window": spec_of(is_causal=True, window=9),
    "a soft cap": spec_of(soft_cap=2.0),
    "linear biases": spec_of(4, 2, is_causal=True, alibi=np.array([0.5, 0.25, 0.1, 0.05], "f4")),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_attention_reads_each_text_by_itself(device, name, dtype):
    spec = SPECS[name]
    step, _ = steps_of(device, LENGTHS, tokens_per_tile=16 // (spec.num_heads // spec.num_kv_heads))
    generator = torch.Generator().manual_seed(0)
    columns = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    # Memory behind the last text may hold anything.
    room = torch.full((sum(LENGTHS) + 64, columns), torch.nan, dtype=dtype)
    room[: sum(LENGTHS)] = torch.randn((sum(LENGTHS), columns), generator=generator)
    qkv = room.to(device)[: sum(LENGTHS)]
    sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    q, k, v = torch.split(qkv, [n * spec.head_dim for n in sizes], dim=1)
    tile = kernels.TextTile(16, 16, 4, 1)
    slopes = None if spec.alibi is None else torch.from_numpy(spec.alibi).to(device)
    found = kernels.attend(q, k, v, step, spec, slopes=slopes, tile=tile)
    expected = PLAIN.attend(q, k, v, step, spec)
    torch.testing.assert_close(found.cpu(), expected.cpu(), **close(dtype))


def test_tiles_as_large_as_a_device_has_them_read_what_small_ones_read(device):
    spec = SPECS["both ways"]
    lengths = [70, 3, 150]
    qkv = torch.randn((223, 192), generator=torch.Generator().manual_seed(1)).to(device)
    q, k, v = qkv.split(64, dim=1)
    tile = kernels.choose_tile(group=1, head_dim=16, itemsize=2, max_text_len=512)
    step, _ = steps_of(device, lengths, tokens_per_tile=tile.block_m)
    found = kernels.attend(q.half(), k.half(), v.half(), step, spec, slopes=None, tile=tile)
    torch.testing.assert_close(
        found.float().cpu(), PLAIN.attend(q, k, v, step, spec).cpu(), rtol=1e-2, atol=1e-2
    )


def test_padding_is_of_no_text_and_becomes_zeros(device):
    spec = SPECS["both ways"]
    step, _ = steps_of(device, LENGTHS)
    _, padded = steps_of(device, LENGTHS, bucket=TextSizes(128, 16, 8 + 16))
    qkv = torch.full((128, 192), torch.nan)
    qkv[: sum(LENGTHS)] = torch.randn((112, 192), generator=torch.Generator().manual_seed(2))
    q, k, v = qkv.to(device).split(64, dim=1)
    tile = kernels.TextTile(16, 16, 4, 1)
    found = kernels.attend(q, k, v, padded, spec, slopes=None, tile=tile)
    exact = kernels.attend(q[:112], k[:112], v[:112], step, spec, slopes=None, tile=tile)
    assert torch.equal(found[:112].cpu(), exact.cpu())
    assert not found[112:].cpu().any()
    rows = torch.randn((128, 40), generator=torch.Generator().manual_seed(3)).to(device)
    for how in ("mean", "max", "mean_sqrt_len", "weightedmean"):
        pooled = kernels.pool(rows, padded, how)
        assert torch.equal(pooled[:6].cpu(), kernels.pool(rows[:112], step, how).cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["mean", "max", "mean_sqrt_len", "weightedmean"])
def test_pooling(device, how, dtype):
    step, _ = steps_of(device, LENGTHS)
    x = torch.randn((112, 200), generator=torch.Generator().manual_seed(3)).to(device, dtype)
    torch.testing.assert_close(
        kernels.pool(x, step, how).cpu(), PLAIN.pool(x, step, how).cpu(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize(
    ("adds", "weighs", "keeps"), list(itertools.product([True, False], repeat=3))
)
def test_layer_norm(device, columns, adds, weighs, keeps):
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn((7, columns), generator=generator).to(device) + 3 for _ in range(2))
    weight, bias = (torch.randn(columns, generator=generator).to(device) for _ in range(2))
    arguments = (
        x, y.half() if adds else None, 0.5,
        NormWeights(weight if weighs else None, bias if weighs else None, 1e-5, torch.float32),
    )  # fmt: skip
    total, found = kernels.layer_norm(*arguments, keeps_sum=keeps)
    expected_total, expected = PLAIN.layer_norm(*arguments, keeps_sum=keeps)
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-5, atol=2e-5)
    assert (total is None) == (expected_total is None) == (not (adds and keeps))
    if total is not None and expected_total is not None:
        torch.testing.assert_close(total.cpu(), expected_total.cpu())


# ── buckets ──


def test_a_third_of_a_bucket_at_most_is_padding():
    sizes = token_buckets(1000)
    assert sizes[:5] == [16, 24, 32, 48, 64] and sizes[-1] == 768
    for count in range(16, 768):
        bucket = min(size for size in sizes if size >= count)
        assert (bucket - count) / bucket < 1 / 3 + 1e-9


def test_the_smallest_bucket_that_holds_a_step():
    step = make_step([([1] * 9, ()), ([1] * 30, ())], is_last=False)
    sizes = bucket_of(step, [16, 48, 96], text_buckets(256), tokens_per_tile=16)
    assert sizes == TextSizes(48, 4, 3 + 4)
    assert bucket_of(step, [16, 32], text_buckets(256), tokens_per_tile=16) is None
    many = make_step([([1], ())] * 20, is_last=False)
    assert bucket_of(many, [16, 24], text_buckets(256), tokens_per_tile=16) == (24, 24, 1 + 24)


def test_large_models_have_graphs_for_small_steps_only():
    assert most_captured(layer_weights=1_770_000, max_tokens=8192) == 8192  # MiniLM
    assert most_captured(layer_weights=12_600_000, max_tokens=8192) == 7142  # BERT large
    assert most_captured(layer_weights=218_000_000, max_tokens=8192) == 412  # 8B
