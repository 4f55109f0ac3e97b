"""8- and 4-bit weights, computed from their packed form: the promised bits, in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels import quantized_reference as reference
from tests.kernels.harness import ISAS, Recorder, bf16, pack, raw, run_rows

DTYPES = ["q8", "q4"]
# Rows, groups of columns, outputs.
SHAPES = [(1, 1, 1), (1, 3, 17), (2, 5, 33), (6, 2, 48), (7, 9, 100), (13, 18, 96), (25, 1, 5)]


def pack_blocks(team: _native.Team, dtype: str, blocks: reference.Blocks) -> _native.Packed:
    rows, groups, size = blocks.q.shape
    packed = _native.Packed(rows, groups * size, dtype)
    data, name = reference.stored(dtype, blocks)
    packed.pack(team, 0, data, name, rows)
    return packed


def random_rows(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Groups of very different sizes, and one of zeros."""
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal((rows, cols))
        * 10.0 ** rng.integers(-3, 4, (rows, cols // 32 + 1))[:, np.arange(cols) // 32]
    )
    x[rows // 2, : min(32, cols)] = 0
    return x.astype(np.float32)


def linear(
    x: np.ndarray,
    weight: reference.Blocks | np.ndarray,
    bias: np.ndarray | None = None,
    *,
    dtype: str,
    isa: str = "",
    threads: int = 1,
    mode: str = "store",
    activation: str = "",
    scale: float = 1.0,
    into: np.ndarray | None = None,
    dst_dtype: str = "f32",
) -> np.ndarray:
    team = _native.Team(threads, isa)
    if isinstance(weight, np.ndarray):
        packed = pack(team, weight, dtype)
    else:
        packed = pack_blocks(team, dtype, weight)

    def build(recorder: Recorder, src: int) -> int:
        program = recorder.program
        dst = recorder.buffer(packed.rows // 2 if mode == "glu" else packed.rows, dst_dtype)
        if into is not None:
            program.embed(dst, pack(team, into, "f32"), 1.0)
        program.linear(dst, src, packed, bias, mode, activation, scale)
        return dst

    return run_rows(team, x, build)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "groups", "out"), SHAPES)
def test_every_element_is_one_chain_of_exact_dot_products(
    isa: str, dtype: str, rows: int, groups: int, out: int
) -> None:
    weight = reference.random_blocks(dtype, out, groups, seed=groups)
    x = random_rows(rows, groups * 32, seed=out)
    got = linear(x, weight, dtype=dtype, isa=isa)
    assert got.tobytes() == reference.linear(x, weight).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_integers_do_not_overflow(isa: str, dtype: str) -> None:
    x = np.ones((3, 96), np.float32)
    x[1, ::2] = -1
    lowest, highest = (-128, 127) if dtype == "q8" else (0, 15)
    q = np.full((40, 3, 32), highest)
    q[::2] = lowest
    ones = np.ones((40, 3), np.float32)
    weight = reference.Blocks(q, ones, ones * 0 if dtype == "q8" else -ones)
    got = linear(x, weight, dtype=dtype, isa=isa)
    assert got.tobytes() == reference.linear(x, weight).tobytes()
    np.testing.assert_allclose(got[0], q.sum((1, 2)) - (96 if dtype == "q4" else 0), rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 2, 31, 33, 48, 63, 70])
def test_columns_that_fill_no_group(isa: str, dtype: str, cols: int) -> None:
    """What pads the last group weighs nothing: not in the weights' scale, not in the sum."""
    rng = np.random.default_rng(cols)
    x, w = (rng.standard_normal((n, cols)).astype(np.float32) for n in (5, 20))
    packed = pack(_native.Team(1, isa), w, dtype)
    w_error = np.abs(packed.unpack() - w).max()
    assert w_error < (0.02 if dtype == "q8" else 0.25)
    got = linear(x, w, dtype=dtype, isa=isa)
    quantized = reference.quantize(x)
    x_used = (quantized.q * quantized.scale[..., None]).reshape(5, -1)[:, :cols]
    np.testing.assert_allclose(got, x_used @ packed.unpack().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add(isa: str, dtype: str) -> None:
    weight = reference.random_blocks(dtype, 37, 3, seed=1)
    x, rng = random_rows(9, 96), np.random.default_rng(1)
    bias, into = (rng.standard_normal(s).astype(np.float32) for s in ((37,), (9, 37)))
    y = linear(x, weight, bias, dtype=dtype, isa=isa)
    np.testing.assert_array_equal(y, reference.linear(x, weight) + bias)
    got = linear(x, weight, bias, dtype=dtype, isa=isa, mode="add", scale=0.3, into=into)
    np.testing.assert_array_equal(got, into + np.float32(0.3) * y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_glu_is_its_parts_fused(isa: str, dtype: str, rows: int) -> None:
    weight = reference.random_blocks(dtype, 96, 2, seed=2)
    x = random_rows(rows, 64)
    bias = np.random.default_rng(1).standard_normal(96).astype(np.float32)
    y = linear(x, weight, bias, dtype=dtype, isa=isa)

    def glu(recorder: Recorder, src: int) -> int:
        dst = recorder.buffer(48)
        recorder.program.glu(dst, src, "silu")
        return dst

    expected = run_rows(_native.Team(1, isa), y, glu)
    options: dict[str, Any] = {"dtype": dtype, "isa": isa, "mode": "glu", "activation": "silu"}
    np.testing.assert_array_equal(linear(x, weight, bias, **options), expected)
    rounded = linear(x, weight, bias, dst_dtype="bf16", **options)
    np.testing.assert_array_equal(rounded, bf16(expected))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["store", "glu"])
def test_a_row_is_the_same_in_any_company(isa: str, dtype: str, mode: str) -> None:
    weight = reference.random_blocks(dtype, 160, 3, seed=3)
    x = random_rows(31, 96)
    options: dict[str, Any] = {"dtype": dtype, "isa": isa, "mode": mode}
    options["activation"] = "silu" if mode == "glu" else ""
    alone = np.concatenate([linear(row[None], weight, **options) for row in x])
    for start, end in [(0, 31), (0, 2), (3, 6), (5, 12), (30, 31), (9, 26)]:
        for threads in (1, 2, 3):
            got = linear(x[start:end], weight, threads=threads, **options)
            assert got.tobytes() == alone[start:end].tobytes(), (start, end, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_rows_do_not_show(dtype: str) -> None:
    for rows, groups in [(250, 2), (60, 150)]:
        weight = reference.random_blocks(dtype, 40, groups, seed=4)
        x = random_rows(rows, groups * 32)
        got = linear(x, weight, dtype=dtype, threads=2)
        assert got.tobytes() == reference.linear(x, weight).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_row_only(isa: str, dtype: str, bad: float) -> None:
    weight = reference.random_blocks(dtype, 32, 2, seed=5)
    x = random_rows(9, 64)
    expected = linear(x, weight, dtype=dtype, isa=isa)
    x[4, 35] = bad
    got = linear(x, weight, dtype=dtype, isa=isa)
    assert np.isnan(got[4]).all()
    keep = np.arange(9) != 4
    np.testing.assert_array_equal(got[keep], expected[keep])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_rows_come_from_the_same_panels(isa: str, dtype: str) -> None:
    team = _native.Team(1, isa)
    table = np.random.default_rng(6).standard_normal((50, 70)).astype(np.float32)
    packed = pack(team, table, dtype)
    recorder = Recorder(team, 50)
    dst = recorder.buffer(70)
    recorder.program.embed(dst, packed, 0.5)
    kv = _native.KVCache(1, 4, 1, 16, "f32")
    count = np.arange(50, dtype=np.int32)
    ids = np.random.default_rng(7).permutation(50).astype(np.int32)
    starts, lens, rows = (np.array(v, np.int32) for v in ([0, 50], [50], [0]))
    tables, none = np.arange(4, dtype=np.int32)[None], np.zeros(0, np.int32)
    recorder.program.run(kv, ids, count, count, starts, lens, rows, tables, none)
    expected = packed.unpack()[ids] * np.float32(0.5)
    np.testing.assert_array_equal(recorder.program.read(dst, 50), expected)


def test_activations_must_be_f32() -> None:
    team = _native.Team(1)
    recorder = Recorder(team, 1)
    src, dst = recorder.buffer(32, "bf16"), recorder.buffer(16)
    packed = pack(team, np.ones((16, 32), np.float32), "q8")
    with pytest.raises(ValueError, match="linear: src is bf16; it must be f32"):
        recorder.program.linear(dst, src, packed)


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_integers_are_kept_as_they_are(dtype: str) -> None:
    blocks = reference.random_blocks(dtype, 37, 11, seed=8)
    packed = pack_blocks(_native.Team(2), dtype, blocks)
    np.testing.assert_array_equal(packed.unpack(), blocks.values())
    data, name = reference.stored(dtype, blocks)
    decoded = _native.dequantize(data, name, blocks.q.size).reshape(37, -1)
    np.testing.assert_array_equal(packed.unpack(), decoded)
    assert packed.nbytes == 48 * 11 * (34 if dtype == "q8" else 20)


def test_q4_0_is_kept_as_it_is() -> None:
    blocks = reference.random_blocks("q4", 20, 9, seed=9)
    scale = blocks.scale.astype(np.float16)[..., None].view(np.uint8)
    nibbles = (blocks.q[..., :16] | blocks.q[..., 16:] << 4).astype(np.uint8)
    data = np.ascontiguousarray(np.concatenate([scale, nibbles], axis=-1)).reshape(-1)
    packed = _native.Packed(20, 288, "q4")
    packed.pack(_native.Team(1), 0, data, "Q4_0", 20)
    decoded = _native.dequantize(data, "Q4_0", 20 * 288).reshape(20, 288)
    np.testing.assert_array_equal(packed.unpack(), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_quantises_weights_the_same(dtype: str) -> None:
    w = np.random.default_rng(10).standard_normal((40, 160)).astype(np.float32)
    w[3, :32] = 0
    w[4, 32:64] = 0.25  # a group of equal values
    packed = [pack(_native.Team(1, isa), w, dtype).unpack() for isa in ISAS]
    for other in packed[1:]:
        assert other.tobytes() == packed[0].tobytes()
    np.testing.assert_array_equal(packed[0][3, :32], 0)
    np.testing.assert_allclose(packed[0][4, 32:64], 0.25, rtol=1e-3)


def test_q8_is_within_half_a_step() -> None:
    w = np.random.default_rng(11).standard_normal((30, 320)).astype(np.float32)
    got = pack(_native.Team(1), w, "q8").unpack()
    step = np.abs(w.reshape(30, 10, 32)).max(-1, keepdims=True) / 127
    off = np.abs(got - w).reshape(30, 10, 32)
    # The scale is rounded to half precision: 127 times half its last place on top.
    assert (off <= step * (0.5 + 127 * 2**-11)).all()


def test_q4_is_better_than_rounding_between_the_ends() -> None:
    w = np.random.default_rng(12).standard_normal((64, 512)).astype(np.float32)
    groups = w.reshape(64, -1, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = (high - low) / 15
    plain = np.rint((groups - low) / step) * step + low
    got = pack(_native.Team(1), w, "q4").unpack().reshape(groups.shape)
    errors = [((v - groups) ** 2).sum(-1) for v in (got, plain)]
    assert errors[0].mean() < 0.9 * errors[1].mean()
    assert (errors[0] <= errors[1] * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_have_no_scale_do_no_harm(dtype: str) -> None:
    w = np.ones((4, 64), np.float32)
    w[0, 0], w[1, 0], w[2, 40], w[3, 0] = np.nan, np.inf, -np.inf, 3e38
    packed = _native.Packed(4, 64, dtype)
    packed.pack(_native.Team(1), 0, raw(w), "F32", 4)
    np.testing.assert_allclose(packed.unpack()[[0, 1, 3], 32:], 1, rtol=1e-2)
