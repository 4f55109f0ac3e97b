"""The draw on the device: the tokens of the sampler's definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch import plain_draw
from octavo_engine.backends.torch.triton import cut, draw
from octavo_engine.sampling.batch import (
    SAMPLED_NOT_FINITE,
    SAMPLED_NOTHING_ALLOWED,
    SAMPLED_OK,
)
from tests.engine.backends.torch_cuda.steps import draw_params, make_sampling
from tests.engine.backends.torch_cuda.variants import Variants
from tests.kernels import sampling_reference as reference


def random_logits(rng, num_rows, vocab, *, ties):
    """Sharp and flat rows, some tokens banned; with `ties` many logits are equal."""
    logits = rng.standard_normal((num_rows, vocab)) * rng.choice([0.1, 2, 8], (num_rows, 1))
    if ties:
        logits = np.round(logits * 2) / 2
    logits[rng.random((num_rows, vocab)) < 0.1] = -np.inf
    logits[:, rng.integers(vocab)] = 0.5
    return logits.astype(np.float32)


def random_wishes(rng, num_rows, *, filtered):
    fields = {
        "seed": rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        "temperature": rng.choice([0, 0.3, 1, 2], num_rows),
    }
    if filtered:
        fields["top_p"] = rng.choice([1, 0.9, 0.3, 0.01], num_rows)
        fields["min_p"] = rng.choice([0, 0, 0.1], num_rows)
        fields["top_k"] = rng.choice([0, 1, 5, 50], num_rows)
    return make_sampling(num_rows, **fields)


def check(draw_tokens, logits, sampling, device):
    before = torch.from_numpy(logits.copy()).to(device)
    on_device = before.clone()
    tokens, status = draw_tokens(on_device, draw_params(sampling, device)).cpu().numpy()
    expected = reference.sample(logits, sampling)
    assert tokens.tolist() == expected.tokens.tolist()
    assert status.tolist() == expected.status.tolist()
    np.testing.assert_array_equal(on_device.cpu(), before.cpu())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [3, 64, 257, 900])
def test_plain_torch_draws_the_defined_tokens(vocab, ties, device):
    rng = np.random.default_rng(vocab)
    for _ in range(4):
        logits = random_logits(rng, 12, vocab, ties=ties)
        check(plain_draw.draw, logits, random_wishes(rng, 12, filtered=True), device)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [5, 300])
def test_triton_draws_the_defined_tokens(vocab, ties, device, monkeypatch):
    monkeypatch.setattr(draw, "CHUNK", 128)
    rng = np.random.default_rng(vocab + 1)
    logits = random_logits(rng, 6, vocab, ties=ties)
    check(draw.draw, logits, random_wishes(rng, 6, filtered=False), device)


@pytest.mark.slow
@pytest.mark.parametrize("room", [2048, 4], ids=["edge", "whole row"])
def test_triton_filters_leave_the_defined_tokens(room, device, monkeypatch):
    """Each filter alone and all together; ties lie on every edge. With little room the rows are
    searched whole."""
    monkeypatch.setattr(draw, "CHUNK", 32)
    monkeypatch.setattr(cut, "BINS", 64)
    monkeypatch.setattr(cut, "ROOM", room)
    monkeypatch.setattr(cut, "PIECE", 64)
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 4, 70, ties=True)
    sampling = make_sampling(
        4, seed=[1, 2, 2**64 - 1, 4], temperature=[1, 0.7, 2, 1],
        top_k=[5, 0, 0, 9], top_p=[1, 0.6, 1, 0.5], min_p=[0, 0, 0.3, 0.01],
    )  # fmt: skip
    check(draw.draw, logits, sampling, device)


def test_only_a_row_s_edge_is_searched(device, monkeypatch):
    """Of 300 logits a few are candidates, however many are cut away or survive for certain."""
    gathered = []
    find = cut.find_cuts

    def watched(cuts, *args):
        find(cuts, *args)
        gathered.append(cuts.counts.tolist())

    monkeypatch.setattr(draw, "find_cuts", watched)
    monkeypatch.setattr(draw, "CHUNK", 128)
    monkeypatch.setattr(cut, "PIECE", 512)
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((5, 300)).astype(np.float32) * 2
    logits[3] = 1.5  # all in one bin
    sampling = make_sampling(
        5, temperature=[1, 1, 1, 1, 0], top_k=[7, 0, 0, 0, 3], top_p=[1, 0.9, 1, 0.5, 1]
    )
    check(draw.draw, logits, sampling, device)
    ((by_count, by_mass, unfiltered, equal, greedy),) = gathered
    assert 7 <= by_count < 12 and 1 <= by_mass < 5
    assert (unfiltered, equal, greedy) == (0, 300, 0)


def test_what_was_drawn_is_kept_where_the_next_step_looks(device):
    logits = np.full((3, 10), -1, np.float32)
    logits[0, 4], logits[1], logits[2, 9] = 1, np.nan, 1
    sampling = make_sampling(3, temperature=0.0)
    sampling.rows = np.array([2, 0, 1], np.int32)
    sampling.targets = np.array([-1, -1, 5], np.int32)  # a token to score is nobody's next
    for draw_tokens in (plain_draw.draw, draw.draw):
        params = draw_params(sampling, device)
        params.kept.fill_(77)
        draw_tokens(torch.from_numpy(logits).to(device), params)
        assert params.kept[:3].tolist() == [0, 77, 4]


@pytest.mark.gpu
def test_triton_draws_the_defined_tokens_of_large_rows(device):
    rng = np.random.default_rng(11)
    for ties in (False, True):
        logits = random_logits(rng, 16, 128256, ties=ties)
        check(draw.draw, logits, random_wishes(rng, 16, filtered=True), device)


@pytest.mark.parametrize("draw_tokens", [plain_draw.draw, draw.draw], ids=["plain", "triton"])
def test_rows_that_cannot_be_drawn_say_why(draw_tokens, device):
    logits = np.zeros((6, 10), np.float32)
    logits[0, 4], logits[1, 9], logits[2] = np.nan, np.inf, -np.inf
    sampling = make_sampling(6, temperature=[1, 0, 1, 1, 0, 0])
    sampling.targets = np.array([-1, -1, -1, 7, -1, 2], np.int32)
    found = draw_tokens(torch.from_numpy(logits).to(device), draw_params(sampling, device))
    tokens, status = found.cpu().numpy()
    assert status.tolist() == [
        SAMPLED_NOT_FINITE, SAMPLED_NOT_FINITE, SAMPLED_NOTHING_ALLOWED,
        SAMPLED_OK, SAMPLED_OK, SAMPLED_OK,
    ]  # fmt: skip
    assert tokens[[0, 1, 2, 3, 4, 5]].tolist() == [-1, -1, -1, 7, 0, 2]


def test_random_words_are_philox():
    seeds = np.array([0, 7, 2**64 - 1, 0x123456789ABCDEF0], np.uint64)
    words = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).T.copy())
    found = plain_draw.random_words(words, torch.tensor([0, 5, 2**31 - 1, 99], dtype=torch.int32))
    for seed, position, value in zip(seeds, [0, 5, 2**31 - 1, 99], found.tolist(), strict=True):
        low, high, *_ = reference.philox(int(seed), position)
        assert value % 2**64 == high << 32 | low


def test_the_upper_half_of_a_product():
    rng = np.random.default_rng(3)
    a = rng.integers(0, 2**64, 50, dtype=np.uint64)
    b = rng.integers(0, 2**63, 50, dtype=np.uint64)
    found = plain_draw.multiply_high(
        torch.from_numpy(a.view(np.int64)), torch.from_numpy(b.view(np.int64))
    )
    assert found.tolist() == [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are seen in the interpreter")
@pytest.mark.slow
def test_one_variant_of_each_kernel_draws_any_number_of_rows(device, monkeypatch):
    """A number of rows that is new would otherwise be compiled while requests wait."""
    variants = Variants(monkeypatch)
    rng = np.random.default_rng(3)
    for num_rows in (1, 2, 3, 4, 5, 8, 16, 17):
        logits = random_logits(rng, num_rows, 70, ties=True)
        check(draw.draw, logits, random_wishes(rng, num_rows, filtered=True), device)
    names = [name for name, *_ in variants.seen]
    assert len(names) == len(set(names)) == 7
