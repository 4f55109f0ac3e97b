"""Paged attention against dense attention in float64, and against itself: the same bits however the
work is cut into steps, batches and threads."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels import reference
from tests.kernels.harness import ISAS, AttentionCase, PagedAttention

RNG = np.random.default_rng(7)
# What a result may be off by, its inputs being of order 1: the format's own rounding.
TOLERANCES = {"f32": 5e-6, "bf16": 2e-2, "int8": 4e-2, "fp8_e4m3": 1e-1, "fp8_e5m2": 2e-1}
# The sets that multiply bf16 without widening it, each in an order of its own.
MULTIPLY_PAIRS = {"avx512bf16", "amx"}
TEMPERATURES = (1 + np.arange(1100) // 30 * 0.2).astype(np.float32)
NORM = RNG.uniform(0.5, 1.5, 32).astype(np.float32)


def random_qkv(case: AttentionCase, *lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.standard_normal((n, case.qkv_cols)).astype(np.float32) for n in lengths]


def whole(
    case: AttentionCase, qkv: list[np.ndarray], isa: str = "", threads: int = 1
) -> list[np.ndarray]:
    """Each sequence alone, in a single step."""
    outputs = []
    for rows in qkv:
        run = PagedAttention(case, [rows], _native.Team(threads, isa))
        run.step([(0, len(rows))])
        outputs.append(run.outputs[0])
    return outputs


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


CASES = {
    "grouped": AttentionCase(),
    "groups_of_three": AttentionCase(num_heads=9, num_kv_heads=3, head_dim=64),
    "multi_head": AttentionCase(num_heads=3, num_kv_heads=3),
    "multi_query": AttentionCase(num_heads=7, num_kv_heads=1, head_dim=16, rotary_dim=16),
    "large_group": AttentionCase(num_heads=50, num_kv_heads=1, head_dim=16, rotary_dim=16),
    "odd_head_dim": AttentionCase(num_heads=2, num_kv_heads=1, head_dim=80, rotary_dim=80),
    "partial_rope": AttentionCase(rotary_dim=20),
    "no_rope": AttentionCase(rotary_dim=0),
    "window": AttentionCase(window=37),
    "window_of_one": AttentionCase(window=1),
    "chunks": AttentionCase(window=37, is_chunked=True),
    "chunks_of_one": AttentionCase(window=1, is_chunked=True),
    "temperature": AttentionCase(rotary_dim=0, query_scales=TEMPERATURES),
    "soft_cap": AttentionCase(soft_cap=1.5, scale=1.0),
    "norms": AttentionCase(q_norm=NORM, k_norm=NORM[::-1].copy()),
    "all": AttentionCase(window=150, soft_cap=20.0, q_norm=NORM, k_norm=NORM, rotary_dim=16),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_dense_causal_attention(isa: str, name: str) -> None:
    case = CASES[name]
    qkv = random_qkv(case, 1, 16, 145)
    for rows, got in zip(qkv, whole(case, qkv, isa), strict=True):
        np.testing.assert_allclose(got, reference.attention(case, rows), atol=3e-6, rtol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", TOLERANCES)
@pytest.mark.parametrize("window", [0, 600])
def test_contexts_beyond_a_partition(kv_dtype: str, window: int) -> None:
    case = AttentionCase(num_heads=2, num_kv_heads=1, window=window, kv_dtype=kv_dtype)
    (rows,) = random_qkv(case, 1100)
    expected = reference.attention(case, rows)
    np.testing.assert_allclose(whole(case, [rows])[0], expected, atol=TOLERANCES[kv_dtype], rtol=0)


def test_result_is_rounded_to_bf16() -> None:
    qkv = random_qkv(AttentionCase(), 20)
    (exact,) = whole(AttentionCase(), qkv)
    (rounded,) = whole(AttentionCase(dst_dtype="bf16"), qkv)
    np.testing.assert_array_equal(rounded.view(np.uint32) & 0xFFFF, 0)
    np.testing.assert_allclose(rounded, exact, rtol=2**-8)


@pytest.mark.parametrize(
    "name", ["grouped", "groups_of_three", "window", "chunks", "temperature", "all", "multi_head"]
)
@pytest.mark.parametrize("kv_dtype", TOLERANCES)
def test_instruction_sets_agree_to_the_bit(name: str, kv_dtype: str) -> None:
    case = AttentionCase(**{**CASES[name].__dict__, "kv_dtype": kv_dtype})
    qkv = random_qkv(case, 150)
    expected = whole(case, qkv, "generic")[0]
    for isa in ISAS:
        if kv_dtype != "bf16" or isa not in MULTIPLY_PAIRS:
            assert same_bits(whole(case, qkv, isa)[0], expected), isa


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in MULTIPLY_PAIRS])
def test_pairs_of_bf16_are_near(isa: str, name: str) -> None:
    """Queries and softmax weights are rounded to bf16 there, as keys and values are everywhere."""
    case = AttentionCase(**{**CASES[name].__dict__, "kv_dtype": "bf16"})
    qkv = random_qkv(case, 1, 16, 145)
    for got, wanted in zip(whole(case, qkv, isa), whole(case, qkv, "generic"), strict=True):
        error = np.abs(got - wanted)
        assert error.max() < 2e-2
        assert np.sqrt((error**2).mean()) < 2e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [0, 5, 6, 37])
def test_half_a_pair_of_tokens_is_seen_alone(isa: str, window: int) -> None:
    """Rows that end, or whose window begins, at odd tokens, beside memory that holds NaN."""
    case = AttentionCase(num_heads=6, num_kv_heads=2, window=window, kv_dtype="bf16")
    (rows,) = random_qkv(case, 75)
    (expected,) = whole(case, [rows], isa)
    for length in (1, 2, 17, 38, 61, 75):
        (got,) = whole(case, [rows[:length]], isa)
        assert same_bits(got, expected[:length]), length


def check_chunks(case: AttentionCase, rows: np.ndarray, expected: np.ndarray, threads: int) -> None:
    """The same bits, however the tokens are cut into steps."""
    for sizes in ([1000, *[1] * 60], [7, 500, 13, 540], [511, 1, 1, 511, 36]):
        run = PagedAttention(case, [rows], _native.Team(threads), seed=len(sizes))
        for size in sizes:
            run.step([(0, size)])
        assert same_bits(run.outputs[0], expected), sizes


@pytest.mark.parametrize("kv_dtype", TOLERANCES)
@pytest.mark.parametrize("window", [0, 70, 700])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_chunks(kv_dtype: str, window: int, threads: int) -> None:
    case = AttentionCase(num_heads=6, num_kv_heads=2, window=window, kv_dtype=kv_dtype)
    (rows,) = random_qkv(case, 1060)
    (expected,) = whole(case, [rows])
    check_chunks(case, rows, expected, threads)


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16"])
@pytest.mark.parametrize("chunk", [23, 32, 600])
@pytest.mark.parametrize("threads", [1, 3])
def test_bits_of_chunked_attention_do_not_depend_on_steps(
    kv_dtype: str, chunk: int, threads: int
) -> None:
    case = AttentionCase(
        window=chunk, is_chunked=True, kv_dtype=kv_dtype, query_scales=TEMPERATURES
    )
    (rows,) = random_qkv(case, 1060)
    (expected,) = whole(case, [rows])
    check_chunks(case, rows, expected, threads)


def test_chunks_and_temperatures_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks need a length"):
        whole(AttentionCase(is_chunked=True), random_qkv(CASES["grouped"], 4))
    short = AttentionCase(query_scales=TEMPERATURES[:3])
    with pytest.raises(ValueError, match="position"):
        whole(short, random_qkv(short, 4))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("threads", "kv_dtype"), [(1, "bf16"), (3, "bf16"), (3, "int8"), (3, "fp8_e4m3")]
)
def test_bits_do_not_depend_on_the_batch(isa: str, threads: int, kv_dtype: str) -> None:
    case = AttentionCase(kv_dtype=kv_dtype, window=60)
    qkv = random_qkv(case, 40, 1, 130, 77)
    expected = whole(case, qkv, isa)
    run = PagedAttention(case, qkv, _native.Team(threads, isa))
    rng = np.random.default_rng(threads)
    while any(run.lengths[i] < len(rows) for i, rows in enumerate(qkv)):
        left = [i for i, rows in enumerate(qkv) if run.lengths[i] < len(rows)]
        chosen = rng.permutation(left)[: rng.integers(1, len(left) + 1)]
        limits = [len(qkv[i]) - run.lengths[i] for i in chosen]
        run.step(
            [(int(i), int(rng.integers(1, n + 1))) for i, n in zip(chosen, limits, strict=True)]
        )
    for got, wanted in zip(run.outputs, expected, strict=True):
        assert same_bits(got, wanted)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8_e4m3"])
def test_many_threads_split_one_long_context(kv_dtype: str) -> None:
    case = AttentionCase(num_heads=2, num_kv_heads=1, kv_dtype=kv_dtype)
    (rows,) = random_qkv(case, 2300)
    (expected,) = whole(case, [rows])
    run = PagedAttention(case, [rows], _native.Team(4))
    run.step([(0, 2290)])
    for _ in range(10):
        run.step([(0, 1)])
    assert same_bits(run.outputs[0], expected)


def test_keys_and_values_land_in_their_slots() -> None:
    case = AttentionCase(rotary_dim=0)
    (rows,) = random_qkv(case, 21)
    run = PagedAttention(case, [rows], _native.Team(1))
    run.step([(0, 21)])
    parts = rows.reshape(21, 8, 32)
    for index, block in enumerate(run.block_tables[0, :2]):
        keys, values = run.kv.read(0, int(block))
        count = min(16, 21 - 16 * index)
        tokens = slice(16 * index, 16 * index + count)
        np.testing.assert_array_equal(keys[:, :count].swapaxes(0, 1), parts[tokens, 4:6])
        np.testing.assert_array_equal(values[:, :count].swapaxes(0, 1), parts[tokens, 6:8])
        assert np.isnan(keys[:, count:]).all()
        assert np.isnan(values[:, count:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_a_later_nan_does_not_reach_earlier_tokens(isa: str, kv_dtype: str) -> None:
    case = AttentionCase(kv_dtype=kv_dtype)
    (rows,) = random_qkv(case, 90)
    (expected,) = whole(case, [rows], isa)
    rows[70:] = np.nan
    (got,) = whole(case, [rows], isa)
    assert same_bits(got[:70], expected[:70])
    assert np.isnan(got[70:]).all()
