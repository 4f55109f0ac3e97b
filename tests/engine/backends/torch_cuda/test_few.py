"""Attention of a few tokens of each sequence, and the sizes that such steps are padded to."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.device_step import StepBuffer, WalkCut, cut_walks
from octavo_engine.backends.torch.few_steps import FewSteps, plan_few
from octavo_engine.backends.torch.operands import LayerKV
from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.backends.torch.triton import few
from octavo_engine.backends.torch.triton.decode import WalkTile
from octavo_engine.backends.torch.triton.heads import turn_and_store
from octavo_engine.backends.torch.triton_kernels import TritonKernels
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.torch_cuda.steps import (
    LIMITS,
    ROOMY,
    make_sampling,
    make_step,
    on_device,
)
from tests.engine.backends.torch_cuda.test_attention import (
    SPECS,
    Paged,
    cos_sin,
    make_spec,
    to_device,
)
from tests.engine.backends.torch_cuda.test_decode import in_parts
from tests.engine.models.tiny import tiny_model

pytestmark = pytest.mark.slow  # kernels in the interpreter

FEW = [(40, 5), (0, 3), (100, 1), (15, 4), (60, 5), (0, 1)]
TILE = WalkTile(block_n=16, num_warps=4, num_stages=1)


def run(paged: Paged, length: int = 1000, width: int = 5, tile: WalkTile = TILE):
    """The result, and what is left in the words that arrivals are counted in."""
    spec = paged.spec
    tiles = in_parts(paged.step.seq_lens.tolist(), length)
    step = on_device(
        paged.step, paged.kv.device, tiles, walks=WalkCut(50, spec.num_heads), width=width
    )
    k, v = paged.kv.unbind()
    kv = LayerKV(k, v)
    angles = cos_sin(spec.rope, paged.kv.device)
    q = turn_and_store(paged.qkv, angles, kv, step, spec)
    result = few.attend(q, kv, step, spec, tile=tile)
    return result.float().cpu(), step.arrivals


# Of the others' models such steps are none; see cuda.walks_few.
UNUSUAL = ("sinks", "sinks and window", "chunks", "linear biases")
USUAL = [name for name in SPECS if name not in UNUSUAL]


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("length", [1000, 16])
def test_a_few_tokens_equal_the_reference_whole_and_in_parts(name, length, device):
    """Parts of 16 tokens: of some the first tokens of a sequence see nothing."""
    paged = Paged(FEW, to_device(SPECS[name], device), device)
    expected = paged.reference()
    result, arrivals = run(paged, length)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)
    assert not arrivals.any()  # the next layer finds them as this one did


def test_more_room_than_tokens_and_more_parts_than_are_added_at_once(device, monkeypatch):
    monkeypatch.setattr(few, "JOINED_VALUES", 64)
    paged = Paged(FEW, make_spec(), device)
    expected = paged.reference()
    result, _ = run(paged, 16, width=13)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_sixteen_bits_stay_close_to_the_reference(dtype, device):
    paged = Paged(FEW, make_spec(), device, dtype)
    expected = paged.reference()
    for length in (1000, 32):
        result, _ = run(paged, length)
        assert (result - expected).norm() / expected.norm() < 1e-2


@pytest.mark.gpu
def test_the_shape_of_a_large_model_stays_close_to_the_reference(device):
    """With the tiles that it is launched with, more than one of them."""
    spec = make_spec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    paged = Paged([(180, 5), (90, 2), (0, 5)], spec, device, torch.bfloat16)
    expected = paged.reference()
    for width in (5, 16, 32):
        tile = few.choose_tile(rows=few.rows_of(4, width), head_dim=128, itemsize=2)
        for length in (1000, 64):
            result, _ = run(paged, length, width, tile)
            assert (result - expected).norm() / expected.norm() < 1e-2


def triton_kernels(**options):
    config = ModelConfig.from_hf(tiny_model("llama").config)
    return TritonKernels(torch.device("cpu"), torch.float32, config, **options)


def test_sizes_are_of_tokens_alone_and_hold_every_step_that_verifies():
    kernels = triton_kernels()
    plan = plan_few(LIMITS, kernels, 4)
    assert plan == FewSteps(5, (4, 8, 16, 24, 32, 48, 64, 80), is_walked=True)
    rng = random.Random(0)
    for _ in range(200):
        counts = [rng.randint(1, 5) for _ in range(rng.randint(1, LIMITS.max_seqs))]
        while sum(counts) > LIMITS.max_seqs + 64:
            counts.pop()
        step = make_step([(3, count) for count in counts], all_logits=True)
        sizes = plan.sizes(step, kernels)
        assert plan.holds(step) and sizes is not None
        assert sizes.tokens >= len(step.token_ids) and sizes.seqs >= len(counts)
        assert sizes.logits >= len(step.logit_rows)
        tiles = cut_walks(step.seq_lens, kernels.walks.spare_parts)
        padding = sizes.seqs - len(counts)
        assert len(tiles.seqs) + padding <= sizes.tiles


def test_steps_with_more_tokens_of_a_sequence_are_none_of_these():
    kernels = triton_kernels()
    plan = plan_few(LIMITS, kernels, 4)
    assert not plan.holds(make_step([(3, 5), (3, 6)]))
    inner = dataclasses.replace(make_step([(3, 5)]), logit_rows=np.empty(0, np.int32))
    assert plan.sizes(inner, kernels) is None  # a part of a prompt
    assert not plan_few(LIMITS, kernels, 0).holds(make_step([(3, 1)]))
    assert plan_few(LIMITS, PlainKernels(), 4) == FewSteps()  # they cannot be captured
    # More rows than a program holds, or bits that must not depend on the batch: tiles.
    assert not plan_few(LIMITS, kernels, 64).is_walked
    assert not plan_few(LIMITS, triton_kernels(batch_invariant=True), 4).is_walked


@pytest.mark.parametrize("tokens", [8, 16, 80])
def test_padding_has_each_token_once_and_reads_nothing(tokens, device):
    kernels = triton_kernels()
    step = make_step([(40, 5), (3, 1)], all_logits=True)
    sizes = plan_few(LIMITS, kernels, 4)._replace(buckets=(tokens,)).sizes(step, kernels)
    assert sizes is not None
    buffer = StepBuffer(ROOMY, device, walks=kernels.walks, num_few=tokens)
    tiles = cut_walks(step.seq_lens, kernels.walks.spare_parts)
    buffer.send(buffer.fill(step, make_sampling(6), tiles, sizes))
    view = buffer.step(sizes, is_decode=False, max_seq_len=256, host=None, width=5)
    starts = view.seq_starts.tolist()
    assert starts[:3] == [0, 5, 6] and starts[-1] == tokens
    assert set(np.diff(starts[2:])) <= {0, 1}
    assert view.seq_lens.tolist()[2:] == [0] * (sizes.seqs - 2)
    assert view.slots.tolist()[6:] == [-1] * (tokens - 6)
    firsts = view.seq_tiles.tolist()
    assert np.diff(firsts).tolist() == [1] * sizes.seqs
    assert [view.tile_seqs.tolist()[first] for first in firsts[:-1]] == list(range(sizes.seqs))
