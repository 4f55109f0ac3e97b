"""What is fused and what must not be, on graphs written by hand: no weights, no extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.backends.native.fusion import fuse, settle_dtypes
from octavo_engine.backends.native.graph import Graph, NativeLinear, Value, read, written
from octavo_engine.backends.native.plan import num_bytes, plan_memory
from octavo_engine.backends.native.recorder import Recorder, record
from octavo_engine.ops import AttentionSpec

if TYPE_CHECKING:
    from octavo_engine.backends.native.graph import Dtype


@dataclass(frozen=True)
class FakePacked:
    """A weight's shape."""

    rows: int
    cols: int
    dtype: Dtype = "bf16"
    is_cut: bool = False
    of_halves: bool = False

    @property
    def total_rows(self) -> int:
        return self.rows


def linear(rows: int, cols: int = 64, dtype: Dtype = "bf16") -> Any:
    return NativeLinear(FakePacked(rows, cols, dtype))  # type: ignore[arg-type]  # only its shape


NORM = np.ones(64, np.float32)
TABLE: Any = FakePacked(100, 64)
LIMITS = {"T": 8, "S": 8}
SPEC = AttentionSpec(layer=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


def kinds(graph: Graph) -> list[str]:
    return [type(instruction).__name__ for instruction in graph.instructions]


def block(ops: Recorder, width: int = 96) -> Value:
    """One layer of Llama and a head."""
    x = ops.embedding(TABLE)
    h = ops.attention(ops.linear(ops.rms_norm(x, NORM, 1e-5), linear(128)), SPEC)
    x = ops.add(x, ops.linear(h, linear(64)))
    h = ops.glu(ops.linear(ops.rms_norm(x, NORM, 1e-5), linear(2 * width)), "silu")
    x = ops.add(x, ops.linear(h, linear(64, width)), scale=0.5)
    return ops.linear(ops.rms_norm(ops.select_rows(x), NORM, 1e-5), linear(100))


def graph_of(ops: Recorder, result: Value) -> Graph:
    return Graph(tuple(ops.instructions), result)


def test_a_layer_becomes_seven_instructions_and_no_conversion() -> None:
    ops = Recorder()
    graph = settle_dtypes(fuse(graph_of(ops, block(ops))))
    assert kinds(graph) == [
        "Embed",
        *("RmsNorm", "Linear", "AttentionNode", "Linear", "RmsNorm", "Linear", "Linear"),
        *("SelectRows", "RmsNorm", "Linear"),
    ]
    o, gate_up, down = (graph.instructions[i] for i in (4, 6, 7))
    assert o.onto == graph.instructions[0].out  # type: ignore[union-attr]
    assert gate_up.glu == "silu"  # type: ignore[union-attr]
    assert (down.onto, down.scale) == (o.out, 0.5)  # type: ignore[union-attr]
    for instruction in graph.instructions:
        if type(instruction).__name__ in ("RmsNorm", "AttentionNode"):
            assert instruction.out.dtype == "bf16"
    assert gate_up.out.dtype == "bf16"
    assert (o.out.dtype, down.out.dtype, graph.result.dtype) == ("f32", "f32", "f32")


def test_unfused_has_a_conversion_before_each_linear() -> None:
    ops = Recorder()
    graph = settle_dtypes(graph_of(ops, block(ops)), elide=False)
    assert kinds(graph).count("Convert") == 5
    for before, instruction in zip(graph.instructions, graph.instructions[1:], strict=False):
        if type(instruction).__name__ == "Linear":
            assert type(before).__name__ == "Convert"
            assert read(instruction) == [before.out]


def test_float32_weights_want_no_conversion() -> None:
    ops = Recorder()
    x = ops.rms_norm(ops.embedding(TABLE), NORM, 1e-5)
    graph = settle_dtypes(graph_of(ops, ops.linear(x, linear(64, dtype="f32"))), elide=False)
    assert kinds(graph) == ["Embed", "RmsNorm", "Linear"]
    assert graph.instructions[1].out.dtype == "f32"


def test_a_glu_of_broken_panels_is_left_alone() -> None:
    ops = Recorder()
    graph = fuse(graph_of(ops, block(ops, width=72)))
    assert kinds(graph).count("Glu") == 1
    assert settle_dtypes(graph).instructions[7].out.dtype == "bf16"  # but it rounds itself


def test_a_sum_and_its_norm_become_one_where_the_sum_has_another_source() -> None:
    ops = Recorder()
    x = ops.embedding(TABLE)
    h = ops.rms_norm(ops.linear(x, linear(64)), NORM, 1e-5)
    total = ops.add(x, h, scale=2.0)
    result = ops.add(total, ops.rms_norm(total, NORM, 1e-5))
    graph = fuse(graph_of(ops, result))
    assert kinds(graph) == ["Embed", "Linear", "RmsNorm", "RmsNorm", "Add"]
    norm: Any = graph.instructions[3]
    assert (norm.x, norm.add, norm.add_scale, norm.total) == (x, h, 2.0, total)
    assert written(norm) == [total, norm.out]


def test_a_residual_that_is_read_again_is_not_taken_over() -> None:
    ops = Recorder()
    x = ops.embedding(TABLE)
    first = ops.add(x, ops.linear(x, linear(64)))  # the linear reads what it would overwrite
    second = ops.add(first, ops.linear(ops.rms_norm(first, NORM, 1e-5), linear(64)))
    graph = fuse(graph_of(ops, ops.add(second, first)))  # and here it is needed afterwards
    assert kinds(graph) == ["Embed", "Linear", "RmsNorm", "Linear", "Add", "Add"]
    assert all(getattr(i, "onto", None) is None for i in graph.instructions)


def test_a_linear_is_added_to_one_residual_only() -> None:
    """Two branches are summed up first, then added to what went around them."""
    ops = Recorder()
    x = ops.embedding(TABLE)
    beside = ops.scale(x, 2.0)
    total = ops.add(x, ops.add(beside, ops.linear(x, linear(64))))
    graph = fuse(graph_of(ops, total))
    assert kinds(graph) == ["Embed", "Scale", "Linear", "Add"]
    assert graph.instructions[2].onto == beside  # type: ignore[union-attr]


def test_a_result_that_is_also_a_residual_is_not_taken_over() -> None:
    ops = Recorder()
    x = ops.embedding(TABLE)
    ops.add(x, ops.linear(ops.rms_norm(x, NORM, 1e-5), linear(64)))
    graph = fuse(graph_of(ops, x))
    assert kinds(graph) == ["Embed", "RmsNorm", "Linear", "Add"]


def test_a_linear_with_two_readers_is_kept_whole() -> None:
    ops = Recorder()
    x = ops.embedding(TABLE)
    y = ops.linear(ops.rms_norm(x, NORM, 1e-5), linear(64))
    graph = fuse(graph_of(ops, ops.add(ops.add(x, y), y)))
    assert kinds(graph) == ["Embed", "RmsNorm", "Linear", "Add", "Add"]


def test_a_linear_that_is_also_the_result_is_kept_whole() -> None:
    ops = Recorder()
    x = ops.embedding(TABLE)
    y = ops.linear(ops.rms_norm(x, NORM, 1e-5), linear(64))
    ops.add(x, y)
    assert kinds(fuse(graph_of(ops, y))) == ["Embed", "RmsNorm", "Linear", "Add"]


def test_a_value_that_others_want_unrounded_is_converted_once() -> None:
    ops = Recorder()
    x = ops.rms_norm(ops.embedding(TABLE), NORM, 1e-5)
    y, z = ops.linear(x, linear(64)), ops.linear(x, linear(64))
    graph = settle_dtypes(graph_of(ops, ops.add(ops.add(x, y), z)))
    assert kinds(graph) == ["Embed", "RmsNorm", "Convert", "Linear", "Linear", "Add", "Add"]
    convert = graph.instructions[2]
    assert [i.x for i in graph.instructions[3:5]] == [convert.out] * 2  # type: ignore[union-attr]
    assert convert.out.dtype == "bf16"
    assert graph.instructions[1].out.dtype == "f32"


def kept_block(ops: Recorder) -> Value:
    """A layer whose residual and whose head's input are kept by name."""
    x = ops.keep("residual", ops.embedding(TABLE))
    h = ops.attention(ops.linear(ops.rms_norm(x, NORM, 1e-5), linear(128)), SPEC)
    x = ops.add(x, ops.linear(h, linear(64)))
    h = ops.keep("hidden", ops.rms_norm(ops.select_rows(x), NORM, 1e-5))
    return ops.linear(h, linear(100))


def test_what_nobody_keeps_leaves_no_trace() -> None:
    assert str(record(kept_block)) == str(record(kept_block, ("other",)))
    assert record(kept_block).kept == ()


def test_what_is_kept_stays_in_float32_and_in_its_own_memory() -> None:
    """The residual would be added onto, and the norm be written rounded."""
    plain = settle_dtypes(fuse(record(kept_block)))
    assert kinds(plain)[-2:] == ["RmsNorm", "Linear"] and "Add" not in kinds(plain)
    graph = settle_dtypes(fuse(record(kept_block, ("residual", "hidden"))))
    assert [name for name, _ in graph.kept] == ["residual", "hidden"]
    assert kinds(graph)[-3:] == ["RmsNorm", "Convert", "Linear"] and "Add" in kinds(graph)
    places = plan_memory(graph, LIMITS)
    for _, value in graph.kept:
        assert value.dtype == "f32"
        own = range(places.offsets[value], places.offsets[value] + num_bytes(value, LIMITS))
        begun = False
        for instruction in graph.instructions:
            for other in written(instruction):
                begun |= other == value
                if begun and other != value:
                    first = places.offsets[other]
                    assert first >= own.stop or first + num_bytes(other, LIMITS) <= own.start
