"""Linear layers: right to float64, exactly the promised sum, and the same bits in any company."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels import reference
from tests.kernels.harness import ISAS, Recorder, bf16, pack, run_rows

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = ["f32", "bf16"]
SHAPES = [(1, 1, 1), (1, 16, 2), (2, 7, 33), (5, 40, 17), (7, 130, 100), (13, 64, 96), (3, 300, 5)]


def random_case(
    rows: int, cols: int, out: int, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows * 1000 + cols * 10 + out)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    w = rng.standard_normal((out, cols)).astype(np.float32)
    bias = rng.standard_normal(out).astype(np.float32)
    return (x, w, bias) if dtype == "f32" else (bf16(x), bf16(w), bias)


def linear(
    x: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    dtype: str = "bf16",
    isa: str = "",
    threads: int = 1,
    mode: str = "store",
    activation: str = "",
    scale: float = 1.0,
    into: np.ndarray | None = None,
    dst_dtype: str = "f32",
) -> np.ndarray:
    team = _native.Team(threads, isa)
    weight = pack(team, w, dtype)

    def build(recorder: Recorder, src: int) -> int:
        program = recorder.program
        cast = recorder.buffer(x.shape[1], dtype)
        program.convert(cast, src)
        cols = len(w) // 2 if mode == "glu" else len(w)
        dst = recorder.buffer(cols, dst_dtype)
        if into is not None:
            program.embed(dst, pack(team, into, "f32"), 1.0)
        program.linear(dst, cast, weight, bias, mode, activation, scale)
        return dst

    return run_rows(team, x, build)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols", "out"), SHAPES)
def test_store(isa: str, dtype: str, rows: int, cols: int, out: int) -> None:
    x, w, bias = random_case(rows, cols, out, dtype)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    got = linear(x, w, dtype=dtype, isa=isa)
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-6)
    got = linear(x, w, bias, dtype=dtype, isa=isa)
    np.testing.assert_allclose(got, expected + bias, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols", "out"), SHAPES)
def test_add(isa: str, dtype: str, rows: int, cols: int, out: int) -> None:
    x, w, bias = random_case(rows, cols, out, dtype)
    into = np.random.default_rng(1).standard_normal((rows, out)).astype(np.float32)
    y = linear(x, w, bias, dtype=dtype, isa=isa)
    got = linear(x, w, bias, dtype=dtype, isa=isa, mode="add", scale=0.3, into=into)
    np.testing.assert_array_equal(got, into + np.float32(0.3) * y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 2, 4, 9])
def test_glu_is_its_parts_fused(isa: str, dtype: str, activation: str, rows: int) -> None:
    x, w, bias = random_case(rows, 50, 96, dtype)
    y = linear(x, w, bias, dtype=dtype, isa=isa)
    team = _native.Team(1, isa)

    def glu(recorder: Recorder, src: int) -> int:
        dst = recorder.buffer(48)
        recorder.program.glu(dst, src, activation)
        return dst

    expected = run_rows(team, y, glu)
    options: dict[str, Any] = {"dtype": dtype, "isa": isa, "mode": "glu", "activation": activation}
    np.testing.assert_array_equal(linear(x, w, bias, **options), expected)
    rounded = linear(x, w, bias, dst_dtype="bf16", **options)
    np.testing.assert_array_equal(rounded, bf16(expected))


def chained(isa: str, dtype: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The order of additions that an instruction set promises."""
    if dtype == "bf16" and isa in ("avx512bf16", "amx"):
        return reference.pair_chain if isa == "avx512bf16" else reference.tile_chain
    return reference.fma_chain


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_one_chain_in_the_promised_order(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for rows, cols in [(7, 334), (1, 32), (37, 96)]:
        # So far apart that sums are rounded, so near that fma_chain is exact.
        sizes = (2.0 ** rng.integers(-6, 6, (n, cols)) for n in (rows, 45))
        x, w = (bf16(size * rng.uniform(0.5, 2, size.shape)) for size in sizes)
        w *= rng.choice([-1, 1], w.shape).astype(np.float32)
        expected = chained(isa, dtype)(x, w)
        np.testing.assert_array_equal(linear(x, w, dtype=dtype, isa=isa), expected)
        assert (expected != reference.fma_chain(x[:, ::-1], w[:, ::-1])).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["store", "glu"])
def test_a_row_is_the_same_in_any_company(isa: str, dtype: str, mode: str) -> None:
    x, w, bias = random_case(31, 70, 160, dtype)
    options: dict[str, Any] = {"dtype": dtype, "isa": isa, "mode": mode}
    options["activation"] = "silu" if mode == "glu" else ""
    alone = np.concatenate([linear(row[None], w, bias, **options) for row in x])
    for start, end in [(0, 31), (0, 2), (3, 6), (5, 12), (30, 31), (9, 26)]:
        for threads in (1, 2, 3):
            got = linear(x[start:end], w, bias, threads=threads, **options)
            assert got.tobytes() == alone[start:end].tobytes(), (start, end, threads)


def test_blocks_of_rows_do_not_show() -> None:
    """More rows than fit one block of the source, and wide ones, of which few fit."""
    for rows, cols in [(250, 66), (60, 5000)]:
        x, w, _ = random_case(rows, cols, 40, "bf16")
        got = linear(x, w, threads=2)
        last = linear(x[-1:], w)
        assert got[-1:].tobytes() == last.tobytes()
        np.testing.assert_allclose(got, x.astype(np.float64) @ w.T, atol=2e-3)


def test_nan_stays_in_its_row() -> None:
    x, w, _ = random_case(9, 32, 32, "bf16")
    expected = linear(x, w)
    x[4, 3] = np.nan
    got = linear(x, w)
    assert np.isnan(got[4]).all()
    keep = np.arange(9) != 4
    np.testing.assert_array_equal(got[keep], expected[keep])


PARTS = {"rows of several blocks": 250, "a row more than a block": 97, "many blocks": 700}


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8"])
@pytest.mark.parametrize("num_rows", PARTS.values(), ids=PARTS)
def test_large_products_are_shared_out_without_a_trace(kind: str, num_rows: int) -> None:
    """Into what is there: a part that two workers take, or none, would show."""
    dtype = "bf16" if kind == "bf16" else "f32"
    x, w, bias = random_case(num_rows, 64, 150, dtype)
    into = np.random.default_rng(2).standard_normal((num_rows, 150)).astype(np.float32)
    team = _native.Team(1)
    few = [
        run_rows(team, x[i : i + 20], adding(team, w, bias, into[i : i + 20], kind))
        for i in range(0, num_rows, 20)
    ]
    for threads in (2, 3, 5):
        team = _native.Team(threads)
        for _ in range(3):
            got = run_rows(team, x, adding(team, w, bias, into, kind))
            assert got.tobytes() == np.concatenate(few).tobytes(), threads


def adding(
    team: _native.Team, w: np.ndarray, bias: np.ndarray, into: np.ndarray, kind: str
) -> Callable[[Recorder, int], int]:
    """Two products added to `into`, and what has no rows between them."""

    def build(recorder: Recorder, src: int) -> int:
        program = recorder.program
        x = src
        if kind == "bf16":
            x = recorder.buffer(w.shape[1], "bf16")
            program.convert(x, src)
        weight = pack(team, w, kind)
        selected = recorder.buffer(w.shape[1], "bf16" if kind == "bf16" else "f32", rows="S")
        dst = recorder.buffer(len(w))
        program.embed(dst, pack(team, into, "f32"), 1.0)
        program.linear(dst, x, weight, bias, "add", "", 0.5)
        program.select_rows(selected, x)
        program.linear(dst, x, weight, bias, "add", "", -0.25)
        return dst

    return build
