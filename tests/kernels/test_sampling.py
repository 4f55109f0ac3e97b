"""The sampling kernel against its slow definition, sampling_reference.py: equal tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine import _native
from octavo_engine.sampling.batch import (
    SAMPLED_NOT_FINITE,
    SAMPLED_NOTHING_ALLOWED,
    SAMPLED_OK,
    Ragged,
    Sampled,
    SamplingBatch,
)
from octavo_engine.sampling.rows import new_table
from octavo_engine.sampling.sampler import sample
from tests.kernels import sampling_reference as reference

TEAM = _native.Team(1)
PAIR = _native.Team(2)


def make_batch(num_rows: int, *, history: np.ndarray | None = None, **fields: Any) -> SamplingBatch:
    """One sequence a row; `fields` of the table are values or lists of values."""
    table = new_table(num_rows)
    for name, value in fields.items():
        table[name] = value
    if history is None:
        history = np.zeros((num_rows, 8), np.int32)
    return SamplingBatch(
        table=table,
        rows=np.arange(num_rows, dtype=np.int32),
        positions=np.full(num_rows, history.shape[1], np.int32),
        targets=np.full(num_rows, -1, np.int32),
        history=history.astype(np.int32),
    )


def make_logits(num_rows: int, vocab: int, *, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_rows, vocab)) * spread).astype(np.float32)


def ragged(lists: list[list[int]], values: list[list[float]] | None = None) -> Ragged:
    starts = np.cumsum([0, *(len(part) for part in lists)]).astype(np.int32)
    ids = np.array([i for part in lists for i in part], np.int32)
    if values is None:
        return Ragged(starts, ids)
    return Ragged(starts, ids, np.array([v for part in values for v in part], np.float32))


def run(logits: np.ndarray, batch: SamplingBatch, team: _native.Team = TEAM) -> Sampled:
    return sample(team, logits.copy(), batch)


def assert_as_defined(logits: np.ndarray, batch: SamplingBatch) -> Sampled:
    got, expected = run(logits, batch), reference.sample(logits, batch)
    assert got.status.tolist() == expected.status.tolist()
    assert got.tokens.tolist() == expected.tokens.tolist()
    if expected.logprobs is not None and expected.top_logprobs is not None:
        assert got.logprobs is not None and got.top_logprobs is not None
        assert got.ranks is not None and got.top_ids is not None
        assert expected.ranks is not None and expected.top_ids is not None
        assert got.ranks.tolist() == expected.ranks.tolist()
        assert got.top_ids.tolist() == expected.top_ids.tolist()
        # log is the platform's own: its last bit is nobody's promise.
        np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=3e-7)
        np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, rtol=3e-7)
    return got


def test_philox_gives_the_published_vectors() -> None:
    assert _native.philox(0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    for key, counter in [(2**64 - 1, 2**64 - 1), (2**63, 17), (0x123456789ABCDEF0, 2**40)]:
        assert _native.philox(key, counter) == reference.philox(key, counter)


@pytest.mark.parametrize("vocab", [1, 15, 64, 65, 1000, 49152])
def test_greedy_takes_the_greatest_and_of_equals_the_first(vocab: int) -> None:
    logits = make_logits(4, vocab)
    logits[1] = logits[1].max()  # all equal
    logits[2, vocab // 2 :] = logits[2].max() + 1
    assert assert_as_defined(logits, make_batch(4)).tokens.tolist() == [
        int(logits[0].argmax()),
        0,
        vocab // 2,
        int(logits[3].argmax()),
    ]


@pytest.mark.parametrize("vocab", [1, 63, 257, 32000])
def test_unfiltered_draws_are_those_of_the_definition(vocab: int) -> None:
    num_rows = 40
    seeds = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    temperatures = np.linspace(0.1, 3, num_rows)
    batch = make_batch(num_rows, seed=seeds, temperature=temperatures)
    assert_as_defined(make_logits(num_rows, vocab), batch)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 700),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    levels=st.sampled_from([0, 3, 50]),  # few distinct logits: many ties
    temperature=st.sampled_from([1e-5, 0.2, 1.0, 2.0, 1e4]),
    top_k=st.sampled_from([0, 1, 2, 7, 100, 2**31 - 1]),
    top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 0.99999994, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
)
def test_filtered_draws_are_those_of_the_definition(
    seed: int,
    vocab: int,
    spread: float,
    levels: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    logits = make_logits(3, vocab, seed=seed, spread=spread)
    if levels:
        logits = np.round(logits * levels / 4).astype(np.float32)
    batch = make_batch(
        3, seed=[seed, 1, 2], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    assert_as_defined(logits, batch)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 9, "min_p": 0.02, "top_p": 0.95},
    ],
)
def test_exactly_the_survivors_are_drawn(fields: dict[str, Any]) -> None:
    draws = 20_000
    batch = make_batch(1, temperature=1.0, **fields)
    logits = make_logits(1, 60, seed=5, spread=2.0)[0]
    expected = set(reference.survivors(logits, batch.table[0]).tolist())
    assert 1 < len(expected) < 60
    many = make_batch(draws, temperature=1.0, seed=np.arange(draws), **fields)
    tokens = run(np.tile(logits, (draws, 1)), many).tokens
    assert set(tokens.tolist()) == expected


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.9999}, {"top_k": 9000}, {"min_p": 1e-7}, {"top_k": 9000, "top_p": 0.999}]
)
def test_a_long_flat_tail_is_not_cut_off(fields: dict[str, Any]) -> None:
    # Tiers of about equal mass, each far below the one before.
    x = np.repeat(np.array([0, -3, -7, -9.5], np.float32), [1, 20, 1000, 13000])
    logits = np.tile(np.random.default_rng(1).permutation(x), (60, 1))
    got = assert_as_defined(logits, make_batch(60, temperature=1.0, seed=np.arange(60), **fields))
    assert set(logits[0, got.tokens].tolist()) == set(x.tolist())


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draws_follow_the_distribution(temperature: float) -> None:
    draws, vocab = 250_000, 40
    logits = make_logits(1, vocab, seed=3, spread=1.5)[0]
    batch = make_batch(draws, temperature=temperature, seed=np.arange(draws))
    tokens = run(np.tile(logits, (draws, 1)), batch).tokens
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    p /= p.sum()
    counts = np.bincount(tokens, minlength=vocab)
    chi_square = float(((counts - draws * p) ** 2 / (draws * p)).sum())
    # 39 degrees of freedom: mean 39, standard deviation 8.8; 80 is beyond 1 in 5000.
    assert chi_square < 80


def test_successive_positions_of_one_seed_follow_the_distribution() -> None:
    draws, vocab = 200_000, 8
    logits = make_logits(1, vocab, seed=4, spread=1.0)[0]
    batch = SamplingBatch(
        table=make_batch(1, temperature=1.0, seed=2**63 - 1).table,
        rows=np.zeros(draws, np.int32),
        positions=np.arange(draws, dtype=np.int32),
        targets=np.full(draws, -1, np.int32),
        history=np.zeros((1, draws), np.int32),
    )
    tokens = run(np.tile(logits, (draws, 1)), batch).tokens
    p = np.exp(logits.astype(np.float64))
    pairs = np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab * vocab)
    expected = draws * np.outer(p, p).ravel() / p.sum() ** 2
    chi_square = float(((pairs - expected) ** 2 / expected).sum())
    assert chi_square < 110  # 63 degrees of freedom; neighbours are independent too


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_key_draws_as_defined(seed: int) -> None:
    batch = make_batch(16, temperature=1.0, seed=np.uint64(seed))
    batch.positions = np.arange(8, dtype=np.int32).repeat(2)
    got = assert_as_defined(make_logits(1, 300).repeat(16, axis=0), batch)
    assert (got.tokens[::2] == got.tokens[1::2]).all()  # the same key and counter
    assert len(set(got.tokens.tolist())) > 2


def test_penalties_count_prompt_and_output_as_defined() -> None:
    num_rows, vocab = 12, 50
    rng = np.random.default_rng(2)
    history = rng.integers(-2, vocab + 2, (num_rows, 30))  # out of range ids are passed over
    batch = make_batch(
        num_rows,
        history=history,
        seed=np.arange(num_rows),
        temperature=np.tile([0.0, 1.0], 6),
        repetition_penalty=np.linspace(0.5, 2, num_rows),
        frequency_penalty=np.linspace(-2, 2, num_rows),
        presence_penalty=np.linspace(2, -2, num_rows),
        num_prompt_tokens=np.arange(num_rows) * 3,
    )
    batch.num_logprobs = 5
    assert_as_defined(make_logits(num_rows, vocab), batch)


def test_frequency_and_presence_look_at_outputs_only() -> None:
    batch = make_batch(
        1,
        history=np.array([[7, 7, 7, 3, 3, 5]]),
        num_prompt_tokens=3,
        frequency_penalty=1.0,
        presence_penalty=0.25,
    )
    logits = np.zeros((1, 8), np.float32)
    logits[0, [7, 3, 5, 1]] = [1.9, 4.0, 2.9, 1.8]  # 3 becomes 1.75, 5 becomes 1.65, 7 stays
    assert run(logits, batch).tokens.tolist() == [7]


def test_repetition_shrinks_positive_and_deepens_negative_logits() -> None:
    history = np.array([[0, 1], [0, 1]])
    batch = make_batch(2, history=history, repetition_penalty=2.0, num_prompt_tokens=2)
    logits = np.array([[4.0, -1.0, 2.5], [-1.0, -1.2, -1.9]], np.float32)
    assert run(logits, batch).tokens.tolist() == [2, 2]


def test_allowed_and_bias_apply_before_the_choice() -> None:
    logits = make_logits(4, 30)
    logits[:, 4] = 50
    batch = make_batch(4)
    batch.allowed = ragged([[1, 2, 3, 999], [], [8], []])
    batch.bias = ragged([[2], [], [8], [9, 4]], [[100.0], [], [-5.0], [60.0, -np.inf]])
    got = assert_as_defined(logits, batch)
    assert got.tokens.tolist() == [2, 4, 8, 9]


def test_logits_stay_finite_under_absurd_bias_and_penalties() -> None:
    largest = np.finfo(np.float32).max
    logits = np.array([[largest, 1, -largest, -np.inf]] * 3, np.float32)
    batch = make_batch(
        3,
        history=np.array([[0, 1, 2, 3]] * 3),
        temperature=[0.0, 1.0, 1e4],
        repetition_penalty=[1e-30, 1e-30, 1e4],
    )
    batch.bias = ragged([[0, 3]] * 3, [[np.inf, np.inf]] * 3)
    assert assert_as_defined(logits, batch).status.tolist() == [SAMPLED_OK] * 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 70, 129])
def test_a_row_that_is_not_finite_fails_alone(bad: float, place: int) -> None:
    logits = make_logits(3, 130)
    whole = run(logits, make_batch(3, temperature=1.0, seed=[1, 2, 3]))
    logits[1, place] = bad
    batch = make_batch(3, temperature=1.0, seed=[1, 2, 3])
    batch.num_logprobs = 2
    got = assert_as_defined(logits, batch)
    assert got.status.tolist() == [SAMPLED_OK, SAMPLED_NOT_FINITE, SAMPLED_OK]
    assert got.tokens.tolist() == [whole.tokens[0], -1, whole.tokens[2]]


def test_minus_infinity_is_a_ban_and_a_row_of_bans_allows_nothing() -> None:
    logits = np.full((4, 10), -np.inf, np.float32)
    logits[1, 6] = -3
    logits[2] = 0
    logits[3, 2] = 1
    batch = make_batch(4, temperature=1.0)
    batch.bias = ragged([[], [], list(range(10)), [2]], [[], [], [-np.inf] * 10, [-np.inf]])
    got = assert_as_defined(logits, batch)
    nothing = SAMPLED_NOTHING_ALLOWED
    assert got.status.tolist() == [nothing, SAMPLED_OK, nothing, nothing]
    assert got.tokens.tolist() == [-1, 6, -1, -1]


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20, 64, 65, 333, 400])
def test_logprobs_are_of_the_raw_logits(num_logprobs: int) -> None:
    logits = make_logits(5, 333)
    logits[3] = np.round(logits[3])  # ties in the ranking
    logits[4, 3:] = -np.inf  # fewer tokens than alternatives asked for
    batch = make_batch(5, temperature=0.8, seed=np.arange(5), top_k=40)
    batch.bias = ragged([[], [5], [], [], []], [[], [100.0], [], [], []])
    batch.num_logprobs = num_logprobs
    got = assert_as_defined(logits, batch)
    assert got.logprobs is not None and got.top_logprobs is not None
    assert got.tokens[1] == 5
    exact = logits[1] - np.log(np.exp(logits[1].astype(np.float64)).sum())
    assert got.logprobs[1] == pytest.approx(exact[5], rel=1e-6)
    assert np.exp(got.top_logprobs[0].astype(np.float64)).sum() <= 1
    assert (got.top_logprobs[:, 1:] <= got.top_logprobs[:, :-1]).all()


def test_a_vocabulary_smaller_than_the_alternatives_is_padded() -> None:
    batch = make_batch(1)
    batch.num_logprobs = 4
    got = assert_as_defined(np.array([[1.0, 2.0]], np.float32), batch)
    assert got.top_ids is not None and got.top_ids.tolist() == [[1, 0, -1, -1]]


def test_targets_are_scored_and_nothing_else_is_done_to_their_row() -> None:
    logits = make_logits(3, 90)
    batch = make_batch(3, temperature=1.0, repetition_penalty=1.7, top_k=1)
    batch.targets = np.array([17, -1, 89], np.int32)
    batch.num_logprobs = 3
    got = assert_as_defined(logits, batch)
    assert got.tokens[[0, 2]].tolist() == [17, 89]
    assert got.ranks is not None and got.ranks[0] == 1 + (logits[0] > logits[0, 17]).sum()


def rich_batch(num_rows: int, vocab: int) -> tuple[np.ndarray, SamplingBatch]:
    """Rows that each want something else."""
    rng = np.random.default_rng(11)
    batch = make_batch(
        num_rows,
        history=rng.integers(0, vocab, (num_rows, 40)),
        seed=rng.integers(0, 2**63, num_rows),
        temperature=rng.choice([0.0, 0.5, 1.0, 1.3], num_rows),
        top_k=rng.choice([0, 10, 300], num_rows),
        top_p=rng.choice([1.0, 0.9], num_rows),
        min_p=rng.choice([0.0, 0.01], num_rows),
        repetition_penalty=rng.choice([1.0, 1.2], num_rows),
        presence_penalty=rng.choice([0.0, 0.5], num_rows),
        num_prompt_tokens=10,
    )
    bias = [list(map(int, rng.integers(0, vocab, k))) for k in rng.integers(0, 4, num_rows)]
    batch.bias = ragged(bias, [[1.5] * len(part) for part in bias])
    batch.num_logprobs = 4
    return make_logits(num_rows, vocab, seed=12), batch


def fields_of(sampled: Sampled) -> list[bytes]:
    return [getattr(sampled, name).tobytes() for name in Sampled.__slots__]


def test_a_row_does_not_depend_on_its_company() -> None:
    logits, batch = rich_batch(24, 5000)
    together = assert_as_defined(logits, batch)
    assert batch.bias is not None and batch.bias.values is not None
    for s in range(24):
        first, end = batch.bias.starts[s : s + 2]
        alone = SamplingBatch(
            table=batch.table,
            rows=batch.rows[s : s + 1],
            positions=batch.positions[s : s + 1],
            targets=batch.targets[s : s + 1],
            history=batch.history,
            bias=Ragged(
                np.array([0, end - first], np.int32),
                batch.bias.ids[first:end],
                batch.bias.values[first:end],
            ),
            num_logprobs=4,
        )
        got = run(logits[s : s + 1], alone)
        for name in Sampled.__slots__:
            assert getattr(got, name)[0].tobytes() == getattr(together, name)[s].tobytes()


def test_two_threads_give_the_bits_of_one() -> None:
    logits, batch = rich_batch(31, 3000)
    one, two = run(logits, batch, TEAM), run(logits, batch, PAIR)
    assert fields_of(one) == fields_of(two)


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_gives_the_bits_of_the_plain_one(isa: str) -> None:
    logits, batch = rich_batch(16, 2000)
    plain = run(logits, batch, _native.Team(1, "generic"))
    assert fields_of(run(logits, batch, _native.Team(1, isa))) == fields_of(plain)


def test_no_rows_are_no_work() -> None:
    assert run(np.zeros((0, 10), np.float32), make_batch(0)).tokens.tolist() == []


def test_arrays_that_do_not_agree_are_refused() -> None:
    logits = make_logits(2, 20)
    batch = make_batch(2)
    batch.rows = np.array([0, 2], np.int32)
    with pytest.raises(ValueError, match="rows: 2 is not a row of the table"):
        run(logits, batch)
    batch = make_batch(2)
    batch.positions = np.array([0, 9], np.int32)
    with pytest.raises(ValueError, match="positions: 9 is outside the history"):
        run(logits, batch)
    batch = make_batch(2)
    batch.targets = np.array([20, -1], np.int32)
    with pytest.raises(ValueError, match="targets: 20 is outside the vocabulary"):
        run(logits, batch)
    batch = make_batch(2)
    batch.bias = Ragged(np.array([0, 1, 3], np.int32), np.zeros(2, np.int32), np.zeros(2, "f4"))
    with pytest.raises(ValueError, match="bias_starts"):
        run(logits, batch)
    with pytest.raises(TypeError):
        run(logits.astype(np.float64), make_batch(2))


@pytest.mark.parametrize("vocab", [1, 70, 3000])
def test_tokens_that_are_asked_for_come_in_place_of_the_likeliest(vocab: int) -> None:
    batch = make_batch(5, seed=range(5), temperature=[0, 1, 1, 0, 1], repetition_penalty=1.2)
    last = vocab - 1
    batch.logprob_ids = ragged([[last, 0, last], [], [0], [last // 2] * 80, [0, last]])
    batch.num_logprobs = 80
    logits = make_logits(5, vocab)
    logits[4, 0] = np.nan
    got = assert_as_defined(logits, batch)
    assert got.top_ids is not None and got.top_logprobs is not None
    assert got.top_ids[0, :4].tolist() == [last, 0, last, -1]
    assert got.top_ids[4].tolist() == [-1] * 80
    # Log-probabilities are those that the whole vocabulary has.
    batch.logprob_ids, batch.num_logprobs = None, vocab
    whole = run(logits, batch)
    assert whole.top_ids is not None and whole.top_logprobs is not None
    of = dict(zip(whole.top_ids[0].tolist(), whole.top_logprobs[0].tolist(), strict=True))
    assert got.top_logprobs[0, :3].tolist() == [of[last], of[0], of[last]]


def test_more_tokens_than_there_is_room_for_are_refused() -> None:
    batch = make_batch(1)
    batch.logprob_ids, batch.num_logprobs = ragged([[1, 2]]), 1
    with pytest.raises(ValueError, match="chosen_starts"):
        run(make_logits(1, 8), batch)
