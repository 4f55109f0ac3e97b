"""A mixture of experts on the device: tiles, products, and whole layers against plain torch."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo_engine.backends.torch import reference
from octavo_engine.backends.torch.kernels import choose_kernels
from octavo_engine.backends.torch.operands import ExpertPair
from octavo_engine.backends.torch.packed import (
    FP8,
    BiasedExperts,
    PackedExperts,
    ScaledWeight,
    expert_product,
)
from octavo_engine.backends.torch.plain import PlainKernels, choose_experts
from octavo_engine.backends.torch.triton import experts, routing, rows
from octavo_engine.models.config import ModelConfig
from octavo_engine.ops import ExpertsSpec
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.models.tiny import tiny_model

SHAPE = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16)
PLAIN = PlainKernels()


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# How experts are chosen and weighed where it is not by a softmax alone.
CHOICES = {
    "sigmoids": ExpertsSpec(3, True, "silu", is_sigmoid=True, scale=2.5),
    "bias": ExpertsSpec(3, True, "silu", is_sigmoid=True, bias=random(8, seed=7) / 4),
    "groups by their best": ExpertsSpec(3, False, "silu", num_groups=4, top_groups=2, scale=3.0),
    "groups by two": ExpertsSpec(
        3, True, "silu", is_sigmoid=True, bias=random(8, seed=7) / 4,
        num_groups=4, top_groups=2, best_of_group=2, scale=2.5,
    ),
    "groups of one": ExpertsSpec(
        3, True, "silu", is_sigmoid=True, num_groups=8, top_groups=4, best_of_group=2
    ),
    "weighed inputs": ExpertsSpec(2, False, "silu", is_sigmoid=True, weighs_inputs=True),
    "clamped units": ExpertsSpec(2, True, "swiglu_clamped"),
}  # fmt: skip


def choice(name, device):
    spec = CHOICES[name]
    return dataclasses.replace(spec, bias=None if spec.bias is None else spec.bias.to(device))


def layer(num_experts, columns, width, device):
    gate_up = random(num_experts, 2 * width, columns, seed=1) * columns**-0.5
    down = random(num_experts, columns, width, seed=2) * width**-0.5
    return gate_up.to(device), down.to(device)


def triton(device, **options):
    return choose_kernels(device, torch.float32, SHAPE, choice="triton", **options)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 8), (3, 8), (40, 4), (200, 2)])
def test_every_pair_is_in_one_tile_of_its_expert(num_tokens, num_experts, device):
    chosen = random(num_tokens, num_experts).argsort(1)[:, :2].int().to(device)
    tiles = routing.cut_tiles(chosen, num_experts, batch_invariant=False)
    seen = []
    for tile, owner in enumerate(tiles.experts.tolist()):
        pairs = tiles.pairs[tile * tiles.block_m : (tile + 1) * tiles.block_m]
        if owner >= 0:
            pairs = pairs[pairs >= 0]
            assert (chosen.flatten()[pairs.long()] == owner).all()
            assert pairs.tolist() == sorted(pairs.tolist())
            seen += pairs.tolist()
    assert sorted(seen) == list(range(2 * num_tokens))


def test_an_expert_that_nobody_chose_has_no_tile(device):
    chosen = torch.tensor([[3, 1]] * 9, dtype=torch.int32, device=device)
    tiles = routing.cut_tiles(chosen, 5, batch_invariant=False)
    assert tiles.experts.tolist() == [1, 3, -1, -1, -1, -1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_experts_equal_their_plain_twin(num_tokens, renormalise, device):
    spec = ExpertsSpec(top_k=3, renormalise=renormalise, activation="silu")
    x, scores = random(num_tokens, 72).to(device), random(num_tokens, 6, seed=3).to(device)
    gate_up, down = layer(6, 72, 40, device)
    found = triton(device).experts(x, scores, ExpertPair(gate_up, down), spec)
    torch.testing.assert_close(
        found, PLAIN.experts(x, scores, ExpertPair(gate_up, down), spec), rtol=2e-5, atol=2e-5
    )
    one = PLAIN.experts(x[:1], scores[:1], ExpertPair(gate_up, down), spec)[0]
    shares, chosen = choose_experts(scores[:1], spec)
    truth = torch.zeros(72, device=device)
    for share, expert in zip(shares[0], chosen[0], strict=True):
        left, right = (gate_up[expert] @ x[0]).chunk(2)
        truth += share * (down[expert] @ (torch.nn.functional.silu(left) * right))
    torch.testing.assert_close(one, truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("choose", [choose_experts, routing.route], ids=["plain", "triton"])
def test_of_equal_scores_the_first_expert_is_taken(choose, device):
    spec = ExpertsSpec(top_k=2, renormalise=True, activation="silu")
    shares, chosen = choose(torch.tensor([[1.0, 2.0, 2.0, 2.0]], device=device), spec)
    assert chosen.tolist() == [[1, 2]]
    assert shares.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 3), (128, 8)])
def test_tokens_are_routed_as_their_plain_twin_says(num_experts, top_k, device):
    spec = ExpertsSpec(top_k=top_k, renormalise=num_experts == 5, activation="silu")
    scores = random(6, num_experts).to(device) * 3
    shares, chosen = routing.route(scores, spec)
    expected = choose_experts(scores, spec)
    assert chosen.tolist() == expected[1].tolist()
    torch.testing.assert_close(shares, expected[0])


@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_is_the_references(name, device):
    spec, scores = choice(name, device), random(40, 8, seed=3).to(device) * 2
    truth = reference.choose_experts(scores.cpu(), CHOICES[name])
    for found in (choose_experts(scores, spec), routing.route(scores, spec)):
        assert found[1].tolist() == truth[1].tolist()
        torch.testing.assert_close(found[0].cpu(), truth[0])


@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_experts_of_each_choice_equal_their_plain_twin(name, has_bias, device):
    spec = choice(name, device)
    x, scores = random(9, 64).to(device), random(9, 8, seed=3).to(device) * 2
    gate_up, down = layer(8, 64, 32, device)
    if has_bias:
        gate_up = BiasedExperts(gate_up, random(8, 64, seed=4).to(device))
        down = BiasedExperts(down, random(8, 64, seed=5).to(device))
    found = triton(device).experts(x * 3, scores, ExpertPair(gate_up, down), spec)
    truth = PLAIN.experts(x * 3, scores, ExpertPair(gate_up, down), spec)
    torch.testing.assert_close(found, truth, rtol=5e-5, atol=5e-5)


def test_a_row_that_is_no_number_spoils_no_other(device):
    """It goes to some expert, as all rows do, and comes back as no number."""
    spec = ExpertsSpec(top_k=2, renormalise=True, activation="silu")
    x, scores = random(3, 64).to(device), random(3, 4, seed=3).to(device)
    gate_up, down = layer(4, 64, 32, device)
    well = triton(device).experts(x, scores, ExpertPair(gate_up, down), spec)
    x[1], scores[1] = torch.nan, torch.nan
    found = triton(device).experts(x, scores, ExpertPair(gate_up, down), spec)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], well[[0, 2]])


def test_a_mixture_is_a_handful_of_launches(device, monkeypatch):
    """Five of Triton's, and of torch none that computes: small ones cost more than their work."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    spec = ExpertsSpec(top_k=2, renormalise=True, activation="silu")
    x, scores = random(3, 64).to(device), random(3, 4, seed=3).to(device)
    gate_up, down = layer(4, 64, 32, device)
    kernels = triton(device)
    seen: list[str] = []
    for module, name in (
        (routing, "route_kernel"), (routing, "place_kernel"), (experts, "experts_kernel"),
        (rows, "glu_kernel"), (routing, "combine_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Launches(name, seen))
    with Counted():
        kernels.experts(x, scores, ExpertPair(gate_up, down), spec)
    assert seen == [
        "route_kernel", "place_kernel", "experts_kernel", "glu_kernel", "experts_kernel",
        "combine_kernel",
    ]  # fmt: skip
    assert set(names) <= {"new_empty", "empty", "view", "_unsafe_view", "empty_like"}


class Launches:
    """A kernel that writes down its launches; there is nothing to compute."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append(self.name)


@pytest.mark.usefixtures("row_by_row")
def test_batch_invariant_tokens_have_the_same_bits_in_any_company(device):
    spec = ExpertsSpec(top_k=2, renormalise=True, activation="silu")
    kernels = triton(device, batch_invariant=True)
    x, scores = random(40, 64).to(device), random(40, 4, seed=3).to(device)
    gate_up, down = layer(4, 64, 32, device)
    together = kernels.experts(x, scores, ExpertPair(gate_up, down), spec)
    for own in (slice(0, 1), slice(30, 40)):
        alone = kernels.experts(x[own], scores[own], ExpertPair(gate_up, down), spec)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize(("dtype", "block"), [(torch.int8, 96), (FP8, 96), (FP8, 32)])
def test_experts_of_eight_bits_on_both_sides_equal_their_plain_twin(dtype, block, device):
    """A product from tokens' rows, and one from pairs' own."""
    stored = (random(4 * 40, 96, seed=1) * (50 if dtype == torch.int8 else 1)).to(dtype)
    scales = random(4 * 40, 96 // block, seed=2).abs() / 30
    packed = PackedExperts(ScaledWeight(stored.to(device), scales.to(device), block), 4)
    assert packed.shape == (4, 40, 96)
    chosen = random(5, 4).argsort(1)[:, :2].int().to(device)
    tiles = routing.cut_tiles(chosen, 4, batch_invariant=False)
    for num_rows in (5, 10):
        x = random(num_rows, 96, seed=4).to(device)
        found = experts.product(x, packed, tiles, 10)
        for pair, expert in enumerate(chosen.flatten().tolist()):
            row = pair * num_rows // 10
            truth = expert_product(x[row : row + 1], packed, expert)[0]
            torch.testing.assert_close(found[pair], truth, rtol=1e-4, atol=1e-4)


def test_no_tokens(device):
    spec = ExpertsSpec(top_k=2, renormalise=True, activation="silu")
    gate_up, down = layer(4, 64, 32, device)
    for kernels in (PLAIN, triton(device)):
        found = kernels.experts(
            torch.empty((0, 64), device=device), torch.empty((0, 4), device=device),
            ExpertPair(gate_up, down), spec,
        )  # fmt: skip
        assert found.shape == (0, 64)


@pytest.mark.slow
def test_a_whole_model_of_experts_in_the_interpreter(device):
    model = tiny_model("mixtral")
    backend = open_cuda(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=512,
        dtype=torch.float32, device=device.type, kernels="triton",
    )  # fmt: skip
    token_ids = random_tokens(9, seed=1)
    logits = run_alone(backend, token_ids, chunks=[7, 1])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)
    names = [name for name in model.tensors if ".experts." in name]
    assert len(names) == 2 * 4 * 3 and len(set(itertools.chain(names))) == len(names)
