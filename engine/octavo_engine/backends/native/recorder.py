"""Ops that write down what a model does instead of doing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.native.graph import (
    Activate,
    Add,
    Attention,
    Embed,
    Glu,
    Graph,
    Linear,
    RmsNorm,
    Scale,
    SelectRows,
    SoftCap,
    Value,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine import _native
    from octavo_engine.backends.native.graph import Instruction, NativeLinear
    from octavo_engine.ops import Activation, AttentionSpec, Model


def record(model: Model) -> Graph:
    """The model's forward pass, as it was written down."""
    recorder = Recorder()
    result = model.forward(recorder)
    return Graph(tuple(recorder.instructions), result)


class Recorder:
    """Ops over values without numbers."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []

    def embedding(self, table: _native.Packed, *, scale: float = 1.0) -> Value:
        return self._add(Embed(self._value(table.cols, None), table, scale))

    def linear(self, x: Value, weight: NativeLinear) -> Value:
        return self._add(Linear(self._value(weight.weight.rows, x), x, weight))

    def rms_norm(self, x: Value, weight: NDArray[np.float32], eps: float) -> Value:
        return self._add(RmsNorm(self._value(x.cols, x), x, weight, eps))

    def attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        return self._add(Attention(self._value(spec.num_heads * spec.head_dim, qkv), qkv, spec))

    def glu(self, x: Value, activation: Activation) -> Value:
        return self._add(Glu(self._value(x.cols // 2, x), x, activation))

    def activation(self, x: Value, activation: Activation) -> Value:
        return self._add(Activate(self._value(x.cols, x), x, activation))

    def add(self, x: Value, y: Value, *, scale: float = 1.0) -> Value:
        return self._add(Add(self._value(x.cols, x), x, y, scale))

    def scale(self, x: Value, factor: float) -> Value:
        return self._add(Scale(self._value(x.cols, x), x, factor))

    def soft_cap(self, x: Value, cap: float) -> Value:
        return self._add(SoftCap(self._value(x.cols, x), x, cap))

    def select_rows(self, x: Value) -> Value:
        return self._add(SelectRows(Value(len(self.instructions), x.cols, "S"), x))

    def _value(self, cols: int, like: Value | None) -> Value:
        return Value(len(self.instructions), cols, "T" if like is None else like.rows)

    def _add(self, instruction: Instruction) -> Value:
        self.instructions.append(instruction)
        return instruction.out
