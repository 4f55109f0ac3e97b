"""8- and 4-bit weights, computed from their packed form: the promised bits, in any company."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine import _native
from tests.kernels import quantized_reference as reference
from tests.kernels.harness import ISAS, Recorder, StepArrays, bf16, pack, raw, run_rows, uniform_kv

FORMS = list(reference.FORMS)  # every integer packing
BITS = [16, 8]  # of activations
DTYPES = ["q8", "q4"]  # those that numbers can be quantised to
# Rows, groups of columns at least, outputs.
# An odd number of panels too: the last one goes alone.
SHAPES = [
    (1, 1, 1), (1, 3, 17), (2, 5, 33), (3, 2, 64), (4, 9, 80), (5, 1, 47), (6, 2, 48),
    (7, 9, 100), (8, 3, 112), (13, 18, 96), (25, 1, 5), (251, 2, 33),
]  # fmt: skip


def random_blocks(dtype: str, out: int, groups: int, seed: int) -> reference.Blocks:
    blocks = -(-groups * 32 // reference.block_values(dtype))
    return reference.random_blocks(dtype, out, blocks, seed)


def pack_blocks(team: _native.Team, blocks: reference.Blocks) -> _native.Packed:
    packed = _native.Packed(blocks.rows, blocks.columns, blocks.packing)
    packed.pack(team, 0, blocks.data.reshape(-1), blocks.form.stored_type, blocks.rows)
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
    dtype: str = "q8",
    isa: str = "",
    threads: int = 1,
    mode: str = "store",
    activation: str = "",
    scale: float = 1.0,
    into: np.ndarray | None = None,
    dst_dtype: str = "f32",
    bits: int = 16,
) -> np.ndarray:
    team = _native.Team(threads, isa)
    if isinstance(weight, np.ndarray):
        packed = pack(team, weight, dtype)
    else:
        packed = pack_blocks(team, weight)

    def build(recorder: Recorder, src: int) -> int:
        program = recorder.program
        dst = recorder.buffer(packed.rows // 2 if mode == "glu" else packed.rows, dst_dtype)
        if into is not None:
            program.embed(dst, pack(team, into, "f32"), 1.0)
        program.linear(dst, src, packed, bias, mode, activation, scale)
        return dst

    return run_rows(team, x, build, activation_bits=bits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "groups", "out"), SHAPES)
def test_every_element_is_one_chain_of_exact_dot_products(
    isa: str, dtype: str, bits: int, rows: int, groups: int, out: int
) -> None:
    weight = random_blocks(dtype, out, groups, seed=groups)
    x = random_rows(rows, weight.columns, seed=out)
    got = linear(x, weight, isa=isa, bits=bits)
    assert got.tobytes() == reference.linear(x, weight, bits).tobytes()


@given(
    dtype=st.sampled_from(FORMS),
    isa=st.sampled_from(ISAS),
    bits=st.sampled_from(BITS),
    rows=st.integers(1, 40),
    groups=st.integers(1, 20),
    out=st.integers(1, 70),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_in_any_company(
    dtype: str, isa: str, bits: int, rows: int, groups: int, out: int, threads: int, seed: int
) -> None:
    weight = random_blocks(dtype, out, groups, seed)
    x = random_rows(rows, weight.columns, seed)
    got = linear(x, weight, isa=isa, bits=bits, threads=threads)
    assert got.tobytes() == reference.linear(x, weight, bits).tobytes()
    alone = linear(x[rows // 2, None], weight, isa=isa, bits=bits)
    assert got[rows // 2].tobytes() == alone.tobytes()


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("bits", BITS)
def test_what_is_off_is_the_rounding_of_activations(dtype: str, bits: int) -> None:
    """Half a step, of 16383 or 127 to its group's largest value, for each; floats add theirs."""
    weight = random_blocks(dtype, 50, 24, seed=4)
    x = random_rows(9, weight.columns)
    w = weight.values().astype(np.float64)
    largest = np.abs(x.reshape(9, -1, 32)).max(-1).repeat(32, axis=1)
    bound = (largest / reference.HIGHEST[bits] / 2) @ np.abs(w).T
    floats = 1e-6 * (np.abs(x) @ np.abs(w).T)
    minima = 1e-6 * largest @ np.ones_like(w).T  # cancel what integers add, and are larger
    off = np.abs(linear(x, weight, bits=bits).astype(np.float64) - x @ w.T)
    assert (off <= bound * 1.001 + floats + minima).all()
    assert off.max() > bound.max() / 1000  # the bound means something


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("bits", BITS)
def test_the_largest_integers_do_not_overflow(isa: str, dtype: str, bits: int) -> None:
    """Codes and small scales with all bits set, and with none but the sign's, alternating rows."""
    weight = random_blocks(dtype, 40, 3, seed=0)
    weight.data[::2], weight.data[1::2] = 0, 255
    if dtype == "q6_k":
        weight.data[::2, :, 192:208] = 128  # the smallest small scale
    reference.set_scales(dtype, weight.data, np.float16(1), np.float16(1))
    x = np.ones((3, weight.columns), np.float32)
    x[1, ::2] = -1
    x[2] = -1
    got = linear(x, weight, isa=isa, bits=bits)
    assert got.tobytes() == reference.linear(x, weight, bits).tobytes()
    np.testing.assert_allclose(got[0], weight.values().sum(1), rtol=1e-5)


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
    x_used = quantized.values()[:, :cols]
    np.testing.assert_allclose(got, x_used @ packed.unpack().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add(isa: str, dtype: str) -> None:
    weight = random_blocks(dtype, 37, 3, seed=1)
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
    weight = random_blocks(dtype, 96, 2, seed=2)
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


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("mode", ["store", "glu"])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_the_same_in_any_company(isa: str, dtype: str, mode: str, bits: int) -> None:
    weight = random_blocks(dtype, 96, 3, seed=3)
    x = random_rows(31, weight.columns)
    options: dict[str, Any] = {"dtype": dtype, "isa": isa, "mode": mode, "bits": bits}
    options["activation"] = "silu" if mode == "glu" else ""
    alone = np.concatenate([linear(row[None], weight, **options) for row in x])
    for start, end in [(0, 31), (0, 2), (3, 6), (5, 12), (30, 31), (9, 26)]:
        for threads in (1, 2, 3):
            got = linear(x[start:end], weight, threads=threads, **options)
            assert got.tobytes() == alone[start:end].tobytes(), (start, end, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_blocks_of_rows_do_not_show(dtype: str, bits: int) -> None:
    for rows, groups in [(250, 2), (60, 150)]:
        weight = random_blocks(dtype, 40, groups, seed=4)
        x = random_rows(rows, groups * 32)
        got = linear(x, weight, dtype=dtype, threads=2, bits=bits)
        assert got.tobytes() == reference.linear(x, weight, bits).tobytes()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_are_quantised_as_the_norm_before_left_them(bits: int, threads: int) -> None:
    """Each worker goes on with the rows that it wrote; two products, so that rows are replaced."""
    team = _native.Team(threads, "")
    first, second = random_blocks("q4", 64, 3, seed=6), random_blocks("q8", 40, 2, seed=7)
    packed = [pack_blocks(team, blocks) for blocks in (first, second)]
    scale = np.linspace(0.5, 2, 96).astype(np.float32)

    def build(recorder: Recorder, src: int) -> int:
        normed, middle, dst = (recorder.buffer(cols) for cols in (96, 64, 40))
        recorder.program.rms_norm(normed, src, scale, 1e-5)
        recorder.program.linear(middle, normed, packed[0])
        recorder.program.linear(dst, middle, packed[1])
        return dst

    def norm(recorder: Recorder, src: int) -> int:
        normed = recorder.buffer(96)
        recorder.program.rms_norm(normed, src, scale, 1e-5)
        return normed

    for rows in (1, 3, 4, 5, 50):
        x = random_rows(rows, 96, seed=rows)
        middle = reference.linear(run_rows(team, x, norm), first, bits)
        got = run_rows(team, x, build, activation_bits=bits)
        assert got.tobytes() == reference.linear(middle, second, bits).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_row_only(
    isa: str, dtype: str, bits: int, bad: float
) -> None:
    weight = random_blocks(dtype, 32, 2, seed=5)
    x = random_rows(9, 64)
    expected = linear(x, weight, dtype=dtype, isa=isa, bits=bits)
    x[4, 35] = bad
    got = linear(x, weight, dtype=dtype, isa=isa, bits=bits)
    assert np.isnan(got[4]).all()
    keep = np.arange(9) != 4
    np.testing.assert_array_equal(got[keep], expected[keep])


def embedded(team: _native.Team, table: _native.Packed, ids: np.ndarray) -> np.ndarray:
    """Half of those rows."""
    recorder = Recorder(team, len(ids))
    dst = recorder.buffer(table.cols)
    recorder.program.embed(dst, table, 0.5)
    kv = uniform_kv(1, 4, 1, 16, "f32")
    changes: dict[str, object] = {"token_ids": ids}
    recorder.program.run(kv, **StepArrays(len(ids), changes=changes).arrays())
    return recorder.program.read(dst, len(ids)).copy()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_rows_come_from_the_same_panels(isa: str, dtype: str) -> None:
    team = _native.Team(1, isa)
    table = np.random.default_rng(6).standard_normal((50, 70)).astype(np.float32)
    packed = pack(team, table, dtype)
    ids = np.random.default_rng(7).permutation(50).astype(np.int32)
    expected = packed.unpack()[ids] * np.float32(0.5)
    np.testing.assert_array_equal(embedded(team, packed, ids), expected)


@pytest.mark.parametrize("dtype", FORMS)
def test_embedding_rows_are_the_files_values(dtype: str) -> None:
    team, blocks = _native.Team(1), random_blocks(dtype, 50, 9, seed=6)
    ids = np.random.default_rng(7).permutation(50).astype(np.int32)
    expected = blocks.values()[ids] * np.float32(0.5)
    np.testing.assert_array_equal(embedded(team, pack_blocks(team, blocks), ids), expected)


def test_activations_must_be_f32() -> None:
    team = _native.Team(1)
    recorder = Recorder(team, 1)
    src, dst = recorder.buffer(32, "bf16"), recorder.buffer(16)
    packed = pack(team, np.ones((16, 32), np.float32), "q8")
    with pytest.raises(ValueError, match="linear: src is bf16; it must be f32"):
        recorder.program.linear(dst, src, packed)


# --- packing --------------------------------------------------------------------------------------


# What small scales cost above the file: they are whole bytes in memory.
# NVFP4's blocks repeat the row's factor, which a file and the memory have once.
EXTRA = {
    "nvfp4": (18 + 4 / 11) / 22,
    "q3_k": 228 / 220,
    "q4_k": 148 / 144,
    "q5_k": 180 / 176,
    "iq4_xs": 138 / 136,
}


@pytest.mark.parametrize("dtype", FORMS)
def test_stored_integers_are_kept_as_they_are_in_the_files_size(dtype: str) -> None:
    blocks = random_blocks(dtype, 48, 11, seed=8)
    packed = pack_blocks(_native.Team(2), blocks)
    np.testing.assert_array_equal(packed.unpack(), blocks.values())
    data, count = blocks.data.reshape(-1), blocks.rows * blocks.columns
    decoded = _native.dequantize(data, blocks.form.stored_type, count)
    np.testing.assert_array_equal(packed.unpack().reshape(-1), decoded)
    assert packed.nbytes == pytest.approx(blocks.data.nbytes * EXTRA.get(dtype, 1), rel=1e-9)
    assert packed.nbytes < 1.04 * blocks.data.nbytes


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_parts_of_different_forms_are_one_matrix(isa: str, threads: int) -> None:
    """Such as files have that spend more on some matrices: each part has the bits of its own."""
    sizes = [("q4_k", 48), ("q4_k", 32), ("q6_k", 16), ("q8", 23)]
    parts = [random_blocks(dtype, rows, 8, seed=rows) for dtype, rows in sizes]
    team = _native.Team(threads, isa)
    packed = _native.Packed([(part.rows, part.packing) for part in parts], 256)
    start = 0
    for part in parts:
        packed.pack(team, start, part.data.reshape(-1), part.form.stored_type, part.rows)
        start += part.rows
    assert (packed.rows, packed.cols, packed.dtype) == (119, 256, "q4_k+q6_k+q8")
    assert packed.nbytes == sum(pack_blocks(team, part).nbytes for part in parts)
    expected = np.concatenate([part.values() for part in parts])
    np.testing.assert_array_equal(packed.unpack(), expected)
    ids = np.arange(118, 54, -1, dtype=np.int32)
    np.testing.assert_array_equal(embedded(team, packed, ids), expected[ids] * np.float32(0.5))

    def build(recorder: Recorder, src: int) -> int:
        dst = recorder.buffer(119)
        recorder.program.linear(dst, src, packed)
        return dst

    for rows, bits in itertools.product((1, 2, 9), BITS):
        x = random_rows(rows, 256)
        each = np.concatenate([reference.linear(x, part, bits) for part in parts], axis=1)
        assert run_rows(team, x, build, activation_bits=bits).tobytes() == each.tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("other", ["q6_k", "q4"])
@pytest.mark.parametrize("bits", BITS)
def test_halves_of_different_forms_are_gated(isa: str, other: str, bits: int) -> None:
    """Neighbours that cannot go together; with 8 bits those of q4 and q4_k are bytes."""
    left = random_blocks("q4_k", 32, 8, seed=1)
    right = random_blocks(other, 32, 8, seed=2)
    team, x = _native.Team(1, isa), random_rows(5, 256)
    packed = _native.Packed([(32, "q4_k"), (32, other)], 256)
    packed.pack(team, 0, left.data.reshape(-1), left.form.stored_type, 32)
    packed.pack(team, 32, right.data.reshape(-1), right.form.stored_type, 32)

    def build(recorder: Recorder, src: int) -> int:
        dst = recorder.buffer(32)
        recorder.program.linear(dst, src, packed, mode="glu", activation="relu")
        return dst

    halves = [reference.linear(x, half, bits) for half in (left, right)]
    expected = np.maximum(halves[0], 0) * halves[1]
    np.testing.assert_array_equal(run_rows(team, x, build, activation_bits=bits), expected)


@pytest.mark.parametrize(
    ("parts", "cols", "message"),
    [
        ([], 256, "there are no parts"),
        ([(16, "q4_k")], 128, "cols is 128; q4_k needs a multiple of 256"),
        ([(15, "q4_k"), (16, "q6_k")], 256, "q6_k from row 15 on; .* starts at a multiple of 16"),
        ([(16, "q8"), (16, "bf16")], 256, "bf16 beside q8; only integers can be mixed"),
        ([(16, "f32"), (16, "bf16")], 256, "bf16 beside f32; only integers can be mixed"),
        ([(16, "q8"), (16, "q4")] * 3, 256, "the packing changes more than 3 times"),
        ([(16, "q8"), (0, "q8")], 256, "rows is 0"),
        ([(16, "q9")], 256, "dtype 'q9' is not known; there are: f32, bf16, q8, q4, q4_0"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(
    parts: list[tuple[int, str]], cols: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _native.Packed(parts, cols)


def test_a_form_that_only_files_have_takes_nothing_else() -> None:
    packed = _native.Packed(16, 256, "q4_k")
    with pytest.raises(ValueError, match="pack: q4_k holds no F32"):
        packed.pack(_native.Team(1), 0, raw(np.ones((16, 256), np.float32)), "F32", 16)


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
