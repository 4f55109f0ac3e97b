"""Attention of long prompts beside the float32 reference, and which sequences it is for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo_engine.backends.torch.device_step import cut_tiles
from octavo_engine.backends.torch.operands import LayerKV
from octavo_engine.backends.torch.triton import prompts
from octavo_engine.backends.torch.triton.heads import turn_and_store
from octavo_engine.backends.torch.triton_kernels import TritonKernels
from tests.engine.backends.torch_cuda.steps import of_prompts, on_device
from tests.engine.backends.torch_cuda.test_attention import Paged, make_spec

pytestmark = pytest.mark.slow
SHORT = 24  # instead of MIN_TOKENS: the interpreter takes its time


class Shape:
    num_heads, num_kv_heads, head_dim = 4, 2, 64


def paged(sequences, device, **changes) -> Paged:
    spec = make_spec(head_dim=64, **changes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    return Paged(sequences, spec, device, dtype)


@pytest.mark.parametrize(
    "sequences",
    [
        [(0, 40)],
        [(37, 30)],
        [(0, 3), (50, 70), (20, 1), (0, 24), (9, 25), (5, 2)],
    ],
)
@pytest.mark.parametrize("num_heads", [4, 6])  # the latter's groups leave rows of a tile unused
def test_long_prompts_equal_the_reference(sequences, num_heads, device, monkeypatch):
    monkeypatch.setattr(prompts, "MIN_TOKENS", SHORT)
    case = paged(sequences, device, num_heads=num_heads)
    expected = case.reference()
    shape = type("Shape", (Shape,), {"num_heads": num_heads})()
    kernels = TritonKernels(device, case.kv.dtype, shape)
    tiles = cut_tiles(case.step.seq_starts, kernels.tokens_per_tile)
    step = on_device(case.step, device, tiles)
    kv = LayerKV(*case.kv)
    q = turn_and_store(case.qkv, None, kv, step, case.spec)
    long = prompts.find_long(step, case.spec, 2)
    assert [one.place for one in long] == [i for i, (_, n) in enumerate(sequences) if n >= SHORT]
    found = kernels.attend(q, kv, step, case.spec)
    error = (found.float().cpu() - expected).abs().max() / expected.abs().max()
    assert error < 1e-2


def test_tiles_of_others_are_all_but_those_of_the_long_ones(device):
    case = paged([(0, 3), (50, 70), (20, 1), (0, 24), (9, 25), (5, 2)], device)
    step = of_prompts(case.step, device, tokens_per_tile=16)
    sequences = [
        prompts.Long(1, 3, 73, 120),
        prompts.Long(3, 74, 98, 24),
        prompts.Long(4, 98, 123, 34),
    ]
    runs = prompts.tiles_of_others(step, sequences, 16)
    assert runs == [range(1), range(6, 7), range(11, 12)]
    assert prompts.tiles_of_others(step, [], 16) == [range(12)]


def test_unusual_heads_and_endless_contexts_stay_in_pages(device, monkeypatch):
    monkeypatch.setattr(prompts, "MIN_TOKENS", SHORT)
    case = paged([(0, 40)], device)
    step = of_prompts(case.step, device)
    assert prompts.find_long(step, case.spec, 2)
    sinks = torch.zeros(4)
    for changes in (
        {"window": 8}, {"soft_cap": 5.0}, {"head_dim": 80}, {"sinks": sinks},
        {"alibi": sinks.numpy()},
    ):  # fmt: skip
        assert not prompts.find_long(step, dataclasses.replace(case.spec, **changes), 2)
    captured = dataclasses.replace(step, host=None)
    assert not prompts.find_long(captured, case.spec, 2)
    monkeypatch.setattr(prompts, "GATHERED_BYTES", 40 * 2 * 2 * 64 * 2 - 1)
    assert not prompts.find_long(step, case.spec, 2)


def test_batch_invariant_results_do_not_depend_on_how_long_a_prompt_is(device):
    assert TritonKernels(device, torch.float16, Shape()).long_tokens == prompts.MIN_TOKENS
    invariant = TritonKernels(device, torch.float16, Shape(), batch_invariant=True)
    assert invariant.long_tokens == 0
    assert TritonKernels(device, torch.float32, Shape()).long_tokens == 0
