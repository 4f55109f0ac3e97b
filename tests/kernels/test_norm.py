"""RMS norm, alone and with the addition before it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels import reference
from tests.kernels.harness import ISAS, Recorder, bf16, pack, run_rows

RNG = np.random.default_rng(11)


def norm(
    x: np.ndarray, weight: np.ndarray, *, isa: str = "", threads: int = 1, dtype: str = "f32"
) -> np.ndarray:
    def build(recorder: Recorder, src: int) -> int:
        dst = recorder.buffer(x.shape[1], dtype)
        recorder.program.rms_norm(dst, src, weight, 1e-5)
        return dst

    return run_rows(_native.Team(threads, isa), x, build)


def case(rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    x = RNG.standard_normal((rows, cols)).astype(np.float32) * 3
    return x, RNG.uniform(0.5, 1.5, cols).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cols", [1, 15, 16, 17, 576, 1000])
def test_norm(isa: str, cols: int) -> None:
    x, weight = case(4, cols)
    expected = reference.rms_norm(x, weight, 1e-5)
    got = norm(x, weight, isa=isa)
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    np.testing.assert_array_equal(norm(x, weight, isa=isa, dtype="bf16"), bf16(got))


@pytest.mark.parametrize("cols", [33, 576])
def test_bits_do_not_depend_on_instruction_set_threads_or_rows(cols: int) -> None:
    x, weight = case(10, cols)
    expected = norm(x, weight, isa="generic")
    for isa in ISAS:
        for threads in (1, 3):
            assert norm(x, weight, isa=isa, threads=threads).tobytes() == expected.tobytes()
        assert norm(x[7:8], weight, isa=isa).tobytes() == expected[7:8].tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_addition_first_changes_src_in_place(isa: str) -> None:
    x, weight = case(5, 70)
    y, _ = case(5, 70)
    team = _native.Team(2, isa)
    sums: list[int] = []

    def build(recorder: Recorder, src: int) -> int:
        added, dst, out = (recorder.buffer(70) for _ in range(3))
        recorder.program.embed(added, pack(team, y, "f32"), 1.0)
        recorder.program.rms_norm(dst, src, weight, 1e-5, add=added, add_scale=0.5)
        recorder.program.convert(out, sums[0] if sums else dst)
        sums.append(src)
        return out

    total = x + np.float32(0.5) * y
    np.testing.assert_array_equal(run_rows(team, x, build), norm(total, weight, isa=isa))
    np.testing.assert_array_equal(run_rows(team, x, build), total)


def test_a_row_of_zeros_stays_zero() -> None:
    np.testing.assert_array_equal(norm(np.zeros((1, 32), np.float32), np.ones(32, np.float32)), 0)
