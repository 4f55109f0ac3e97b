"""8-bit KV: what is stored is the format's nearest number, and attention is that of what is stored,
on every instruction set the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine import _native
from tests.kernels import reference
from tests.kernels.harness import ISAS, AttentionCase, PagedAttention

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
FORMATS = tuple(LARGEST)
PLAIN = AttentionCase(num_heads=1, num_kv_heads=1, head_dim=32, rotary_dim=0)


def stored(rows: np.ndarray, kv_dtype: str, isa: str = "") -> np.ndarray:
    """Rows [tokens, 32] after they were written as keys, and as values, and read back."""
    case = AttentionCase(**{**PLAIN.__dict__, "kv_dtype": kv_dtype})
    qkv = np.concatenate([np.zeros_like(rows), rows, rows], axis=1)
    run = PagedAttention(case, [qkv], _native.Team(1, isa))
    run.step([(0, len(rows))])
    read = [run.kv.read(0, int(block)) for block in run.block_tables[0] if block >= 0]
    keys: np.ndarray = np.concatenate([k[0] for k, _ in read])[: len(rows)]
    values = np.concatenate([v[0] for _, v in read])[: len(rows)]
    np.testing.assert_array_equal(keys, values)
    return keys


def nearest(rows: np.ndarray, kv_dtype: str) -> np.ndarray:
    """The same in plain numpy, with torch's 8-bit floats."""
    largest = np.float32(LARGEST[kv_dtype])
    exact = np.abs(rows).max(axis=1, keepdims=True) / largest
    bits = exact.view(np.uint32).astype(np.uint64)
    scale = ((bits + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)  # to bf16, upwards
    scaled = rows * (np.float32(1) / scale)
    if kv_dtype == "int8":
        whole: np.ndarray = np.rint(scaled) * scale
        return whole
    dtype, smallest = {
        "fp8_e4m3": (torch.float8_e4m3fn, 2.0**-6),
        "fp8_e5m2": (torch.float8_e5m2, 2.0**-14),
    }[kv_dtype]
    rounded = torch.from_numpy(scaled).to(dtype).to(torch.float32).numpy()
    tiny = np.where(np.abs(scaled) < smallest / 2, 0, np.copysign(smallest, scaled))
    narrowed: np.ndarray = np.where(np.abs(scaled) < smallest, tiny, rounded) * scale
    return narrowed


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_each_number_becomes_the_nearest(kv_dtype: str, isa: str) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((200, 32)) * np.exp2(rng.integers(-30, 30, (200, 1)))
    rows *= np.exp2(rng.integers(-12, 1, rows.shape))  # small beside the row's largest, too
    rows = rows.astype(np.float32)
    np.testing.assert_array_equal(stored(rows, kv_dtype, isa), nearest(rows, kv_dtype))


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_number_is_off_by_half_a_step_at_most(kv_dtype: str) -> None:
    rows = np.random.default_rng(5).uniform(-3, 3, (64, 32)).astype(np.float32)
    largest = np.abs(rows).max(axis=1, keepdims=True) * (1 + 2**-7)  # the scale is rounded up
    if kv_dtype == "int8":
        limit = largest / 127 / 2 * np.ones_like(rows)
    else:
        half_step, smallest = {"fp8_e4m3": (2**-4, 2**-6), "fp8_e5m2": (2**-3, 2**-14)}[kv_dtype]
        limit = np.maximum(np.abs(rows) * half_step, largest / LARGEST[kv_dtype] * smallest / 2)
    assert (np.abs(stored(rows, kv_dtype) - rows) <= limit).all()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_extremes(kv_dtype: str) -> None:
    rows = np.zeros((6, 32), np.float32)
    rows[1, 3] = -3e38
    rows[2] = 1e-35  # its scale would be no normal number
    rows[3, :2] = 1, np.nan
    rows[4, :2] = 1, -np.inf
    rows[5] = 1.0
    got = stored(rows, kv_dtype)
    assert not got[[0, 2]].any()
    np.testing.assert_allclose(got[1], rows[1], rtol=2**-7)
    assert np.isnan(got[3]).all()
    assert not np.isfinite(got[4]).any()
    np.testing.assert_allclose(got[5], rows[5], rtol=2**-7)


@st.composite
def cases(draw: st.DrawFn) -> tuple[AttentionCase, list[int]]:
    """Odd shapes, and the steps in which a sequence is computed."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    head_dim = 16 * draw(st.integers(1, 6))
    window = draw(st.sampled_from([0, 0, 1, 17, 130]))
    case = AttentionCase(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=2 * draw(st.integers(0, head_dim // 2)),
        window=window,
        soft_cap=draw(st.sampled_from([0.0, 2.0])),
        scale=0.2,
        kv_dtype=draw(st.sampled_from(FORMATS)),
    )
    return case, draw(st.lists(st.integers(1, 170), min_size=1, max_size=4))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(cases())
def test_attention_is_that_of_what_is_stored(drawn: tuple[AttentionCase, list[int]]) -> None:
    case, steps = drawn
    rng = np.random.default_rng(sum(steps))
    rows = rng.standard_normal((sum(steps), case.qkv_cols)).astype(np.float32)
    outputs = []
    for isa in ISAS:
        run = PagedAttention(case, [rows], _native.Team(2, isa))
        for count in steps:
            run.step([(0, count)])
        outputs.append(run.outputs[0])
        assert run.outputs[0].tobytes() == outputs[0].tobytes(), isa
    keys, values = stored_of(run, case, len(rows))
    expected = reference.attention(case, rows, stored=(keys, values))
    np.testing.assert_allclose(outputs[0], expected, atol=2e-5, rtol=1e-4)


def stored_of(
    run: PagedAttention, case: AttentionCase, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """All of a sequence's keys, already rotated, and values: [tokens, num_kv_heads, head_dim]."""
    read = [run.kv.read(0, int(block)) for block in run.block_tables[0] if block >= 0]
    keys, values = (
        np.concatenate([pair[i] for pair in read], axis=1).swapaxes(0, 1)[:num_tokens]
        for i in (0, 1)
    )
    return keys, values
