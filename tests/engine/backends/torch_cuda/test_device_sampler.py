"""Unusual wishes on the device against the sampler's definition."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.device_sampler import _penalise, is_plain, sample
from octavo_engine.backends.torch.landing import Landing, marks_of
from octavo_engine.backends.torch.plain_draw import draw
from octavo_engine.backends.torch.token_counts import TokenCounts
from octavo_engine.sampling.batch import Ragged
from octavo_engine.sampling.processors import ProcessedRow, apply_processors
from tests.engine.backends.torch_cuda.recorders import NothingWaits
from tests.engine.backends.torch_cuda.steps import draw_params, make_sampling
from tests.kernels import sampling_reference as reference


def sampled_on(logits, sampling, device):
    return landed(
        sample(
            torch.from_numpy(logits.copy()).to(device),
            sampling,
            draw_params(sampling, device),
            draw,
            counts_of(logits, sampling, device),
        ),
        device,
    )


def check(logits, sampling, device):
    found = sampled_on(logits, sampling, device)
    expected = reference.sample(logits, sampling)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.status.tolist() == expected.status.tolist()
    if sampling.num_logprobs >= 0:
        assert found.logprobs is not None and expected.logprobs is not None
        assert found.top_logprobs is not None and expected.top_logprobs is not None
        np.testing.assert_array_equal(found.ranks, expected.ranks)
        np.testing.assert_array_equal(found.top_ids, expected.top_ids)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-6)
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-6)
    return found


def counts_of(logits, sampling, device):
    """Nothing is counted yet."""
    return TokenCounts(len(sampling.table), logits.shape[1], device)


def landed(found, device):
    """As they arrive on the host."""
    return Landing(device, marks_of(device)).begin(*found).wait()


def logits_of(num_rows, vocab=60, seed=0):
    rng = np.random.default_rng(seed)
    return (np.round(rng.standard_normal((num_rows, vocab)) * 8) / 4).astype(np.float32)


def ragged(lists, values=None):
    starts = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    ids = np.array([i for part in lists for i in part], np.int32)
    flat = None if values is None else np.array([v for part in values for v in part], np.float32)
    return Ragged(starts, ids, flat)


def test_logprobs_of_raw_logits_with_ties_ranks_and_targets(device):
    sampling = make_sampling(6, temperature=[0, 1, 1, 0, 1, 0], seed=range(6))
    sampling.targets = np.array([-1, -1, 5, 59, -1, -1], np.int32)
    sampling.num_logprobs = 7
    logits = logits_of(6)
    logits[4, 3] = np.nan
    logits[5] = -np.inf
    check(logits, sampling, device)


def test_more_alternatives_than_tokens(device):
    sampling = make_sampling(2)
    sampling.num_logprobs = 9
    found = check(logits_of(2, vocab=4), sampling, device)
    assert found.top_ids[:, 4:].tolist() == [[-1] * 5] * 2


def test_penalties_count_outputs_and_see_the_prompt(device):
    rng = np.random.default_rng(4)
    sampling = make_sampling(
        8, temperature=[0, 1] * 4, seed=range(8), num_prompt_tokens=4,
        repetition_penalty=[1, 1.3, 0.8, 1, 1, 2, 1, 1.1],
        frequency_penalty=[0, 0, 0.3, 0.5, 0, -0.2, 0, 0],
        presence_penalty=[0, 0, 0, 0, 0.7, 0.1, 0, -0.4],
    )  # fmt: skip
    sampling.history[:] = rng.integers(-1, 62, sampling.history.shape)  # some are in no vocabulary
    logits = logits_of(8)
    logits[:, 7] = -np.inf
    logits[5, 8] = np.finfo(np.float32).max
    sampling.num_logprobs = 2
    check(logits, sampling, device)


@pytest.mark.parametrize("vocab", [60, 3])
def test_penalties_see_a_last_token_that_only_the_device_knows(vocab, device):
    """Rows 1 and 2 await theirs: one that is new to them, and one that they had before."""
    sampling = make_sampling(
        4, temperature=0, num_prompt_tokens=4, frequency_penalty=[0.5, 9, 9, 9],
        repetition_penalty=[1.3, 1, 1.5, 1],
    )  # fmt: skip
    sampling.history[:] = np.arange(sampling.history.shape[1]) % vocab
    logits = logits_of(4, vocab)
    latest = logits.argmax(-1)  # what is penalised is what would be taken
    truth = dataclasses.replace(sampling, history=sampling.history.copy())
    truth.history[[1, 2], truth.positions[[1, 2]] - 1] = latest[[1, 2]]
    expected = reference.sample(logits, truth)
    assert vocab == 3 or expected.tokens[1] != latest[1]

    sampling.awaited = np.array([False, True, True, False])
    sampling.history[[1, 2], sampling.positions[[1, 2]] - 1] = 2**30  # the host's is anything
    params = draw_params(sampling, device)
    params.kept[:4] = torch.from_numpy(np.where(sampling.awaited, latest, 99).astype(np.int32))
    counts = counts_of(logits, sampling, device)
    with NothingWaits():
        on_device = torch.from_numpy(logits.copy()).to(device)
        _penalise(on_device, sampling, params, counts)
    found = landed((draw(on_device, params), None), device)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert params.kept[:4].tolist() == expected.tokens.tolist()


def test_bias_in_list_order_bans_and_allowed_lists(device):
    sampling = make_sampling(4, temperature=[0, 0, 1, 0], seed=range(4))
    sampling.bias = ragged(
        [[3, 3, 70], [], [1, 2, 1, -1], [9]],
        [[5.0, -np.inf, 1.0], [], [4.0, 4.0, 0.25, 2.0], [3e38]],
    )
    sampling.allowed = ragged([[], [5, 6, 99], [1, 2, 3], []])
    logits = logits_of(4)
    logits[3, 9] = 2e38
    check(logits, sampling, device)
    sampling.allowed = ragged([[], [99], [1, 2, 3], []])
    assert check(logits, sampling, device).status.tolist() == [0, 2, 0, 0]


def test_only_the_rows_of_processors_travel(device):
    def shift(token_ids, row):
        row[:] = np.roll(row, len(token_ids))

    def fail(token_ids, row):
        raise RuntimeError("by its own fault")

    sampling = make_sampling(3)
    tokens = np.arange(5, dtype=np.int32)
    sampling.processed = [ProcessedRow(0, (shift,), tokens), ProcessedRow(2, (fail,), tokens)]
    logits = logits_of(3)
    found = sampled_on(logits, sampling, device)
    apply_processors(sampling.processed, logits)
    assert found.tokens.tolist() == [*logits[:2].argmax(-1), -1]
    assert found.status.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", 0.7, True), ("top_k", 3, True), ("min_p", 0.1, True),
        ("repetition_penalty", 1.1, False), ("presence_penalty", 0.1, False),
    ],
)  # fmt: skip
def test_what_the_draw_does_alone(field, value, expected):
    usual = 1 if field == "repetition_penalty" else 0
    assert is_plain(make_sampling(2, **{field: [usual, value]})) is expected
    scored = make_sampling(2, **{field: value})
    scored.num_logprobs = 0
    assert not is_plain(scored)


def test_tokens_that_are_asked_for_come_in_place_of_the_likeliest(device):
    sampling = make_sampling(4, temperature=[0, 1, 1, 0], seed=range(4))
    sampling.logprob_ids = ragged([[59, 0, 59], [], [7], [1, 2]])
    sampling.num_logprobs = 5
    logits = logits_of(4)
    logits[3, 3] = np.nan
    assert not is_plain(sampling)
    found = check(logits, sampling, device)
    assert found.top_ids[0].tolist() == [59, 0, 59, -1, -1]
    assert found.top_ids[2].tolist() == [7, -1, -1, -1, -1]


def test_more_tokens_asked_for_than_there_are(device):
    sampling = make_sampling(2)
    sampling.logprob_ids, sampling.num_logprobs = ragged([[0, 1, 2, 3, 0, 1], []]), 6
    found = check(logits_of(2, vocab=4), sampling, device)
    assert found.top_ids.tolist()[0] == [0, 1, 2, 3, 0, 1]
    assert found.top_ids.tolist()[1][4:] == [-1, -1]
