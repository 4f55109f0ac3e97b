"""The other instructions, the shape of a run, and the errors of a program that does not fit."""

from __future__ import annotations

import gc
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from octavo_engine import _native
from tests.kernels import reference
from tests.kernels.harness import ISAS, Recorder, StepArrays, bf16, pack, run_rows, uniform_kv

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(5)
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]
# Wide enough to reach the ends of exp, fine enough near zero to see a loss of digits.
WIDE = np.concatenate(
    [np.linspace(-120, 120, 301), np.linspace(-1.5, 1.5, 302), [0.0, -0.0, 1e-30, 0.6249, 0.6251]]
).astype(np.float32)[None]


def unary(method: str, cols: int, *args: Any, dtype: str = "f32") -> Callable[[Recorder, int], int]:
    def build(recorder: Recorder, src: int) -> int:
        dst = recorder.buffer(cols, dtype)
        getattr(recorder.program, method)(dst, src, *args)
        return dst

    return build


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(isa: str, name: str) -> None:
    got = run_rows(_native.Team(1, isa), WIDE, unary("activation", WIDE.shape[1], name))
    np.testing.assert_allclose(got, reference.activate(name, WIDE), rtol=4e-6, atol=5e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_agree_to_the_bit_and_keep_nan(name: str) -> None:
    x = WIDE.copy()
    x[0, 17] = np.nan
    build = unary("activation", x.shape[1], name)
    expected = run_rows(_native.Team(1, "generic"), x, build)
    assert np.isnan(expected[0, 17])
    assert np.isnan(expected).sum() == 1
    for isa in ISAS:
        np.testing.assert_array_equal(run_rows(_native.Team(1, isa), x, build), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_soft_cap(isa: str) -> None:
    got = run_rows(_native.Team(1, isa), WIDE, unary("soft_cap", WIDE.shape[1], 2.0))
    np.testing.assert_allclose(got, 2 * np.tanh(WIDE.astype(np.float64) / 2), rtol=5e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_gate_is_a_rows_own(isa: str, threads: int) -> None:
    """Its score is one column of a product, far ends of the sigmoid and not-a-number too."""
    x = RNG.standard_normal((5, 19)).astype(np.float32)
    x[:, 0] = [-200.0, -3.0, 0.25, 200.0, np.nan]
    pick = np.zeros((1, 19), np.float32)
    pick[0, 0] = 1
    team = _native.Team(threads, isa)
    weight = pack(team, pick, "f32")

    def build(recorder: Recorder, src: int) -> int:
        scores, dst = recorder.buffer(1), recorder.buffer(19)
        recorder.program.linear(scores, src, weight)
        recorder.program.gate(dst, src, scores)
        recorder.program.gate(src, src, scores)  # in place as well
        recorder.program.add(dst, dst, src, scale=0.0)
        return dst

    got = run_rows(team, x, build)
    shares = 1 / (1 + np.exp(-x[:4, :1].astype(np.float64)))
    np.testing.assert_allclose(got[:4], x[:4] * shares, rtol=5e-7, atol=1e-37)
    assert np.isnan(got[4]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_glu(isa: str, name: str) -> None:
    x = RNG.standard_normal((3, 42)).astype(np.float32)
    activated = run_rows(_native.Team(2, isa), x[:, :21].copy(), unary("activation", 21, name))
    got = run_rows(_native.Team(2, isa), x, unary("glu", 21, name))
    np.testing.assert_array_equal(got, activated * x[:, 21:])
    rounded = run_rows(_native.Team(2, isa), x, unary("glu", 21, name, dtype="bf16"))
    np.testing.assert_array_equal(rounded, bf16(got))


@pytest.mark.parametrize("isa", ISAS)
def test_convert_rounds_to_nearest_even_and_back(isa: str) -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x80008000, 0xFF800000],
        np.uint32,
    )
    x = np.concatenate([bits.view(np.float32), RNG.standard_normal(30).astype(np.float32)])[None]

    def build(recorder: Recorder, src: int) -> int:
        rounded, widened = recorder.buffer(37, "bf16"), recorder.buffer(37)
        recorder.program.convert(rounded, src)
        recorder.program.convert(widened, rounded)
        return widened

    got = run_rows(_native.Team(1, isa), x, build)
    np.testing.assert_array_equal(got, bf16(x))
    assert got.view(np.uint32)[0, :3].tolist() == [0x3F800000, 0x3F820000, 0x3F810000]
    x[0, 20] = np.array([0x7F800001], np.uint32).view(np.float32)[
        0
    ]  # rounding must not make it inf
    assert np.isnan(run_rows(_native.Team(1, isa), x, build)[0, 20])


@pytest.mark.parametrize("isa", ISAS)
def test_scale_and_add_in_place(isa: str) -> None:
    x = RNG.standard_normal((3, 19)).astype(np.float32)

    def build(recorder: Recorder, src: int) -> int:
        doubled = recorder.buffer(19)
        recorder.program.scale(doubled, src, 1.7)
        recorder.program.add(src, src, doubled, scale=0.25)
        return src

    expected = x + np.float32(0.25) * (x * np.float32(1.7))
    np.testing.assert_array_equal(run_rows(_native.Team(2, isa), x, build), expected)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("isa", ISAS)
def test_embedding_gathers_from_the_panels(dtype: str, isa: str) -> None:
    table = RNG.standard_normal((37, 21)).astype(np.float32)
    team = _native.Team(2, isa)
    recorder = Recorder(team, 8)
    dst = recorder.buffer(21)
    recorder.program.embed(dst, pack(team, table, dtype), 3.0)
    ids = [36, 0, 17, 17, 15, 16]
    arrays = StepArrays(6, changes={"token_ids": ids}).arrays()
    recorder.program.run(uniform_kv(1, 1, 1, 16, "f32"), **arrays)
    stored = table if dtype == "f32" else bf16(table)
    np.testing.assert_array_equal(recorder.program.read(dst, 6), stored[ids] * np.float32(3))


def test_select_rows() -> None:
    x = RNG.standard_normal((20, 33)).astype(np.float32)
    wanted = [19, 3, 3, 0]

    def build(recorder: Recorder, src: int) -> int:
        dst = recorder.buffer(33, "f32", "S")
        recorder.program.select_rows(dst, src)
        return dst

    got = run_rows(_native.Team(2), x, build, logit_rows=wanted, rows="S")
    np.testing.assert_array_equal(got, x[wanted])


def test_no_tokens_and_no_logits_are_fine() -> None:
    team = _native.Team(2)
    weight = pack(team, np.ones((16, 4), np.float32), "f32")

    def build(recorder: Recorder, src: int) -> int:
        selected, logits = recorder.buffer(4, "f32", "S"), recorder.buffer(16, "f32", "S")
        recorder.program.select_rows(selected, src)
        recorder.program.linear(logits, selected, weight)
        return logits

    for tokens in (0, 3):
        x = np.ones((tokens, 4), np.float32)
        assert run_rows(team, x, build, rows="S").shape == (0, 16)


def test_read_is_a_view_that_keeps_the_program_alive() -> None:
    team = _native.Team(1)
    recorder = Recorder(team, 2)
    buffer = recorder.buffer(4)
    recorder.program.embed(buffer, pack(team, np.ones((2, 4), np.float32), "f32"), 1.0)
    kv = uniform_kv(1, 1, 1, 16, "f32")
    view = recorder.program.read(buffer, 2)
    recorder.program.run(kv, **StepArrays(2).arrays())
    gone = weakref.ref(recorder.program)
    del recorder
    gc.collect()
    assert gone() is not None
    np.testing.assert_array_equal(view, 1)
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("num_threads", [1, 2])
def test_operations_tell_when_each_was_done(num_threads: int) -> None:
    team = _native.Team(num_threads)
    recorder = Recorder(team, 3, 2)
    embedded, selected = recorder.buffer(4), recorder.buffer(4, "f32", "S")
    recorder.program.embed(embedded, pack(team, np.ones((3, 4), np.float32), "f32"), 1.0)
    recorder.program.select_rows(selected, embedded)
    kv = uniform_kv(1, 1, 1, 16, "f32")
    times = np.full(3, -1, np.int64)
    before = time.perf_counter_ns()
    recorder.program.run(kv, **StepArrays(3, [2]).arrays(), op_times=times)
    assert before <= times[0] <= times[1] <= times[2] <= time.perf_counter_ns()
    recorder.program.run(kv, **StepArrays(3).arrays(), op_times=times)
    assert times[1] > 0 and times[2] == 0  # no rows were wanted
    with pytest.raises(ValueError, match="op_times must hold 3 times; got 2"):
        recorder.program.run(kv, **StepArrays(3).arrays(), op_times=np.zeros(2, np.int64))


def valid_program() -> tuple[Recorder, _native.KVCache]:
    team = _native.Team(1)
    recorder = Recorder(team, 40, 4)
    qkv, out = recorder.buffer(48), recorder.buffer(16)
    recorder.program.embed(qkv, pack(team, np.ones((30, 48), np.float32), "f32"), 1.0)
    table = np.ones((25, 16), np.float32)
    recorder.program.attention(out, qkv, 0, 1, 1, 16, 1.0, 16, table)
    return recorder, uniform_kv(1, 3, 1, 16, "f32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [30] * 20}, r"token_ids\[0\] is 30; it must be between 0 and 29"),
        ({"token_ids": [-1] * 20}, r"token_ids\[0\] is -1"),
        ({"token_ids": [0] * 41}, "41 tokens; the program was planned for 40"),
        ({"logit_rows": [0] * 5}, "5 logit_rows; the program was planned for 4"),
        ({"logit_rows": [20]}, r"logit_rows\[0\] is 20; it must be between 0 and 19"),
        ({"positions": np.arange(19)}, "positions has 19 entries; it must have 20"),
        ({"positions": np.arange(20) + 6}, r"positions\[19\] is 25; it must be between 0 and 24"),
        ({"positions": np.arange(20)[::-1]}, r"positions\[0\] is 19; by seq_starts and seq_lens"),
        ({"slots": np.arange(20)[None] + 1}, r"slots\[0\]\[0\] is 1; by block_tables it must be 0"),
        ({"seq_starts": [0]}, "seq_starts has 1 entries; it must have 2"),
        ({"seq_starts": [1, 20]}, r"seq_starts\[0\] is 1; it must be 0"),
        ({"seq_starts": [0, 19]}, "seq_starts ends at 19, but there are 20 tokens"),
        ({"seq_lens": [19]}, r"seq_lens\[0\] is 19, but the step has 20 tokens"),
        ({"seq_lens": [33]}, r"takes 3 blocks; block_tables has 2 columns"),
        ({"rows": [1]}, r"rows\[0\] is 1; it must be between 0 and 0"),
        ({"rows": []}, "rows has 0 entries; it must have 1"),
        ({"block_tables": [[[0, 3]]]}, r"block_tables\[0\]\[0\]\[1\] is 3; the cache has 3 blocks"),
        ({"block_tables": [[[0, -1]]]}, r"block_tables\[0\]\[0\]\[1\] is -1"),
        (
            {"seq_starts": [0, 30, 20], "seq_lens": [30, 5], "rows": [0, 0]},
            r"seq_starts\[1\] is 30, but there are 20 tokens",
        ),
    ],
)
def test_a_step_that_does_not_agree_is_refused(changes: dict[str, Any], message: str) -> None:
    recorder, kv = valid_program()
    recorder.program.run(kv, **StepArrays(20).arrays())
    with pytest.raises(ValueError, match=message):
        recorder.program.run(kv, **StepArrays(20, changes=changes).arrays())
    recorder.program.run(kv, **StepArrays(20).arrays())


def test_a_cache_of_another_shape_is_refused() -> None:
    recorder, _ = valid_program()
    with pytest.raises(ValueError, match="1 KV heads of 16 columns, but the KV cache has 2 of 16"):
        recorder.program.run(uniform_kv(1, 3, 2, 16, "f32"), **StepArrays(20).arrays())


def test_other_integers_are_refused() -> None:
    recorder, kv = valid_program()
    arrays = StepArrays(20).arrays()
    with pytest.raises(TypeError):
        recorder.program.run(kv, **(arrays | {"token_ids": arrays["token_ids"].astype(np.int64)}))


def refuse(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_instructions_that_do_not_fit_are_refused() -> None:
    team = _native.Team(1)
    p = _native.Program(team, 4096, 4, 2)
    a, b = p.buffer(0, 16, "f32", "T"), p.buffer(256, 32, "f32", "T")
    half, s = p.buffer(1024, 16, "bf16", "T"), p.buffer(1280, 16, "f32", "S")
    overlapping = p.buffer(64, 16, "f32", "T")
    apart = p.buffer(2048, 16, "f32", "T")
    w = _native.Packed(32, 16, "f32")
    ones = np.ones(16, np.float32)
    refuse("offset 8 is not a multiple of 64", lambda: p.buffer(8, 16, "f32", "T"))
    refuse("bytes 3904 to 4160 of an arena of 4096", lambda: p.buffer(3904, 16, "f32", "T"))
    refuse("dtype 'f16' is not known", lambda: p.buffer(0, 16, "f16", "T"))
    refuse("rows 'X' is not known", lambda: p.buffer(0, 16, "f32", "X"))
    refuse("there is no buffer 9; 6 were declared", lambda: p.convert(a, 9))
    refuse("src has 32 columns; it must have 16", lambda: p.convert(a, b))
    refuse("rows of dst are T, those of src S", lambda: p.convert(a, s))
    refuse("rows of dst must be S", lambda: p.select_rows(half, a))
    refuse("activation 'swish' is not known", lambda: p.activation(a, a, "swish"))
    refuse("scores has 16 columns; it must have 1", lambda: p.gate(a, apart, a))
    one = p.buffer(2304, 1, "f32", "S")
    refuse("rows of dst are T, those of src S", lambda: p.gate(a, apart, one))
    score = p.buffer(2560, 1, "f32", "T")
    refuse("src has 32 columns; it must have 16", lambda: p.gate(a, b, score))
    refuse("cap is 0", lambda: p.soft_cap(a, a, 0.0))
    refuse("dst has 16 columns; it must have 32", lambda: p.linear(apart, a, w))
    refuse("src is bf16; it must be f32", lambda: p.linear(b, half, w))
    refuse("bias has 16 values for 32 weight rows", lambda: p.linear(b, a, w, ones))
    refuse("mode 'mul' is not known", lambda: p.linear(b, a, w, None, "mul"))
    refuse("scale 2 needs mode add", lambda: p.linear(b, a, w, None, "store", "", 2.0))
    refuse("needs an activation", lambda: p.linear(apart, a, w, None, "glu"))
    odd = _native.Packed(48, 16, "f32")
    refuse("each half must be a multiple of 16", lambda: p.linear(b, a, odd, None, "glu", "silu"))
    refuse("dst at 64 overlaps what it reads at 0", lambda: p.convert(overlapping, a))
    refuse("weight has 3 values for 16", lambda: p.rms_norm(a, a, np.ones(3, np.float32), 1e-5))
    refuse("head_dim is 8", lambda: p.attention(a, b, 0, 1, 1, 8, 1.0))
    refuse("3 heads and 2 KV heads", lambda: p.attention(a, b, 0, 3, 2, 16, 1.0))
    refuse("rows of a buffer of 4", lambda: p.read(a, 5))
    refuse("max_tokens is 0", lambda: _native.Program(team, 64, 0, 0))
    refuse("activation_bits is 4; it must be 8 or 16", lambda: _native.Program(team, 64, 1, 0, 4))
