"""Ops that write down what a model does instead of doing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.native.graph import (
    Activate,
    Add,
    AttentionNode,
    Clamp,
    Columns,
    CrossAttentionNode,
    DeltaRule,
    Embed,
    FeaturesNode,
    GateNode,
    Glu,
    Graph,
    GroupNorm,
    InputRows,
    Join,
    LatentAttentionNode,
    LayerNorm,
    Linear,
    MatchRms,
    Mix,
    Moe,
    Multiply,
    PoolRows,
    RmsNorm,
    Scale,
    ScaleColumns,
    SelectiveScan,
    SelectRows,
    ShiftRows,
    ShortConv,
    SoftCap,
    Sparsify,
    SsdScan,
    StoreCross,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Literal

    from numpy.typing import NDArray

    from octavo_engine import _native
    from octavo_engine.backends.native.graph import (
        Dtype,
        Instruction,
        NativeExperts,
        NativeHeads,
        NativeLinear,
    )
    from octavo_engine.ops import (
        Activation,
        AttentionSpec,
        ConvSpec,
        CrossSpec,
        DeltaSpec,
        ExpertsSpec,
        LatentAttentionSpec,
        Pool,
        SelectiveSpec,
        SsdSpec,
    )


def record(forward: Callable[[Recorder], Value], keep: Collection[str] = ()) -> Graph:
    """A model's forward pass, as it was written down, with what has one of the names in `keep`."""
    recorder = Recorder(keep)
    result = forward(recorder)
    return Graph(tuple(recorder.instructions), result, tuple(recorder.kept.items()))


class Recorder:
    """VisionOps, LatentOps, StreamOps and CrossOps over values without numbers."""

    def __init__(self, keep: Collection[str] = ()) -> None:
        self.instructions: list[Instruction] = []
        self.kept: dict[str, Value] = {}
        self._keep = keep

    def embedding(self, table: _native.Packed, *, scale: float = 1.0) -> Value:
        return self._add(Embed(self._value(table.cols, None), table, scale))

    def table(
        self, table: _native.Packed, of: Literal["positions", "types"], *, offset: int = 0
    ) -> Value:
        return self._add(Embed(self._value(table.cols, None), table, 1.0, of, offset))

    def input(self, columns: int, *, first: int = 0) -> Value:
        return self._add(InputRows(self._value(columns, None), first))

    def add_picture_rows(self, x: Value, index: int) -> Value:
        rows = InputRows(self._value(x.cols, None), index * x.cols, is_sparse=True)
        return self.add(x, self._add(rows))

    def linear(self, x: Value, weight: NativeLinear) -> Value:
        out, u = self._value(weight.weight.total_rows, x), None
        if weight.adapters is not None:
            slots, site = weight.adapters
            # An id below zero: no other instruction writes it.
            u = Value(-1 - 3 * out.id, slots.shrunken_cols(site), x.rows)
        return self._add(Linear(out, x, weight, u=u))

    def rms_norm(self, x: Value, weight: NDArray[np.float32], eps: float) -> Value:
        return self._add(RmsNorm(self._value(x.cols, x), x, weight, eps))

    def layer_norm(
        self,
        x: Value,
        weight: NDArray[np.float32] | None,
        bias: NDArray[np.float32] | None,
        eps: float,
    ) -> Value:
        weight = np.ones(x.cols, np.float32) if weight is None else weight
        return self._add(LayerNorm(self._value(x.cols, x), x, weight, bias, eps))

    def attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        return self._add(AttentionNode(self._value(spec.num_heads * spec.head_dim, qkv), qkv, spec))

    def encoder_attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        out = self._value(spec.num_heads * spec.head_dim, qkv)
        return self._add(AttentionNode(out, qkv, spec, is_whole=True))

    def latent_attention(
        self,
        q: Value,
        kv: Value,
        key_up: NativeHeads,
        value_up: NativeHeads,
        spec: LatentAttentionSpec,
    ) -> Value:
        out = self._value(spec.num_heads * spec.value_dim, q)
        # Ids below zero: no other instruction writes them.
        first, heads = -1 - 3 * out.id, spec.num_heads
        nope = Value(first, heads * spec.nope_dim, q.rows, _input_dtype(key_up.weights[0]))
        mixed = Value(first - 1, heads * spec.rank, q.rows, _input_dtype(value_up.weights[0]))
        return self._add(LatentAttentionNode(out, q, kv, nope, mixed, key_up, value_up, spec))

    def glu(self, x: Value, activation: Activation) -> Value:
        return self._add(Glu(self._value(x.cols // 2, x), x, activation))

    def experts(
        self,
        x: Value,
        scores: Value,
        gate_up: NativeExperts,
        down: NativeExperts,
        spec: ExpertsSpec,
    ) -> Value:
        wide, narrow = gate_up.weights[0], down.weights[0]
        out = self._value(x.cols, x)
        # Ids below zero: no other instruction writes them.
        first = -1 - 3 * out.id
        gathered = Value(first, spec.top_k * x.cols, x.rows, _input_dtype(wide))
        hidden = Value(first - 1, spec.top_k * narrow.cols, x.rows, _input_dtype(narrow))
        results = Value(first - 2, spec.top_k * x.cols, x.rows)
        return self._add(Moe(out, x, scores, gathered, hidden, results, gate_up, down, spec))

    def activation(self, x: Value, activation: Activation) -> Value:
        return self._add(Activate(self._value(x.cols, x), x, activation))

    def add(self, x: Value, y: Value, *, scale: float = 1.0) -> Value:
        return self._add(Add(self._value(x.cols, x), x, y, scale))

    def scale(self, x: Value, factor: float) -> Value:
        return self._add(Scale(self._value(x.cols, x), x, factor))

    def gate(self, x: Value, scores: Value) -> Value:
        return self._add(GateNode(self._value(x.cols, x), x, scores))

    def clamp(self, x: Value, limit: float) -> Value:
        return self._add(Clamp(self._value(x.cols, x), x, limit))

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._add(SoftCap(self._value(x.cols, x), x, cap))

    def select_rows(self, x: Value) -> Value:
        return self._add(SelectRows(Value(len(self.instructions), x.cols, "S"), x))

    def keep(self, name: str, x: Value) -> Value:
        if name in self._keep:
            self.kept[name] = x
        return x

    def pool(self, x: Value, how: Pool) -> Value:
        return self._add(PoolRows(Value(len(self.instructions), x.cols, "S"), x, how))

    def features(self, columns: int) -> Value:
        return self._add(FeaturesNode(self._value(columns, None)))

    def shift_rows(self, x: Value) -> Value:
        return self._add(ShiftRows(self._value(x.cols, x), x))

    def store_cross(self, kv: Value, spec: CrossSpec) -> None:
        self._add(StoreCross(self._value(1, kv), kv, spec))

    def cross_attention(self, q: Value, spec: CrossSpec) -> Value:
        return self._add(CrossAttentionNode(self._value(q.cols, q), q, spec))

    def columns(self, x: Value, first: int, count: int) -> Value:
        return self._add(Columns(self._value(count, x), x, first))

    def join(self, x: Value, y: Value) -> Value:
        return self._add(Join(self._value(x.cols + y.cols, x), x, y))

    def multiply(self, x: Value, y: Value, activation: Activation | None = None) -> Value:
        return self._add(Multiply(self._value(x.cols, x), x, y, activation))

    def group_norm(self, x: Value, weight: NDArray[np.float32], eps: float, size: int) -> Value:
        return self._add(GroupNorm(self._value(x.cols, x), x, weight, eps, size))

    def mix(self, x: Value, weights: Value, num_inputs: int, *, offset: float = 0.0) -> Value:
        cols = weights.cols // num_inputs * (x.cols // num_inputs)
        return self._add(Mix(self._value(cols, x), x, weights, num_inputs, offset))

    def match_rms(self, x: Value, like: Value, floor: float) -> Value:
        return self._add(MatchRms(self._value(x.cols, x), x, like, floor))

    def sparsify(self, x: Value, deviations: float) -> Value:
        return self._add(Sparsify(self._value(x.cols, x), x, deviations))

    def scale_columns(self, x: Value, factors: NDArray[np.float32]) -> Value:
        return self._add(ScaleColumns(self._value(x.cols, x), x, factors))

    def short_conv(self, x: Value, spec: ConvSpec) -> Value:
        return self._add(ShortConv(self._value(x.cols, x), x, spec))

    def ssd_scan(self, xbc: Value, dt: Value, spec: SsdSpec) -> Value:
        return self._add(SsdScan(self._value(spec.num_heads * spec.head_dim, xbc), xbc, dt, spec))

    def selective_scan(self, x: Value, dt: Value, b: Value, c: Value, spec: SelectiveSpec) -> Value:
        return self._add(SelectiveScan(self._value(spec.width, x), x, dt, b, c, spec))

    def delta_rule(self, qkv: Value, gates: Value, spec: DeltaSpec) -> Value:
        out = self._value(spec.num_value_heads * spec.value_dim, qkv)
        return self._add(DeltaRule(out, qkv, gates, spec))

    def _value(self, cols: int, like: Value | None) -> Value:
        return Value(len(self.instructions), cols, "T" if like is None else like.rows)

    def _add(self, instruction: Instruction) -> Value:
        self.instructions.append(instruction)
        return instruction.out


def _input_dtype(weight: _native.Packed) -> Dtype:
    return "bf16" if weight.dtype == "bf16" else "f32"
