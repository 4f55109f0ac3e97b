"""A forward pass as a list of instructions over values that are each written once.

What fusion adds is in the same instructions: a linear that adds onto a residual, a norm that adds
first. Such an instruction takes over the memory of a value it reads (`takes_over`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine import _native
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

Dtype = Literal["f32", "bf16"]


@dataclass(frozen=True, slots=True)
class Value:
    """What an instruction wrote: a row for each token (T), or for each row of logits (S)."""

    id: int
    cols: int
    rows: Literal["T", "S"] = "T"
    dtype: Dtype = "f32"


class LinearAdapters(NamedTuple):
    """Where the adapters of a linear layer are."""

    slots: _native.AdapterSlots
    site: int


class NativeLinear(NamedTuple):
    """A packed weight [out, in] and its bias."""

    weight: _native.Packed
    bias: NDArray[np.float32] | None = None
    adapters: LinearAdapters | None = None


class NativeExperts(NamedTuple):
    """Packed weights of one shape and packing: of all experts, or of those that a rank has."""

    weights: tuple[_native.Packed, ...]
    first: int  # the slot of the first one that is here; others follow it
    slots: int  # of all ranks; more than there are experts where some are held several times
    total: int  # experts that there are
    bias: NDArray[np.float32] | None = None  # of those that are here, side by side


class NativeHeads(NamedTuple):
    """A packed weight for each head that this process computes, in numbers."""

    weights: tuple[_native.Packed, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    out: Value
    table: _native.Packed
    scale: float
    of: Literal["tokens", "positions", "types"] = "tokens"
    offset: int = 0


@dataclass(frozen=True, slots=True)
class InputRows:
    """out = columns of rows that the step brings, from `first` on; sparse: zeros where it brings
    none."""

    out: Value
    first: int = 0
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x · weightᵀ + bias, and what adapters add to x · weightᵀ.

    With `activation`: of that. With `glu`: activation(left half) * right half of that. With `onto`:
    onto + scale * that, in onto's memory. `u` is for the rows as adapters shrink them; no other
    node reads it.
    """

    out: Value
    x: Value
    linear: NativeLinear
    activation: Activation | None = None
    glu: Activation | None = None
    onto: Value | None = None
    scale: float = 1.0
    u: Value | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """out = norm(x).

    With `add`: total = x + add_scale * add, in x's memory, and out = norm(total).
    """

    out: Value
    x: Value
    weight: NDArray[np.float32]
    eps: float
    add: Value | None = None
    add_scale: float = 1.0
    total: Value | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """As RmsNorm."""

    out: Value
    x: Value
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    eps: float
    add: Value | None = None
    add_scale: float = 1.0
    total: Value | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionNode:
    out: Value
    qkv: Value
    spec: AttentionSpec
    is_whole: bool = False  # over texts that are whole in the step


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttentionNode:
    """`nope` is for the queries as key_up takes them, `mixed` for the sums as value_up does; no
    other node reads them."""

    out: Value
    q: Value
    kv: Value
    nope: Value
    mixed: Value
    key_up: NativeHeads
    value_up: NativeHeads
    spec: LatentAttentionSpec


@dataclass(frozen=True, slots=True, eq=False)
class Moe:
    """The products of a mixture of experts, between three values that no other node reads: a row
    for each token and each of its experts, `top_k` of them side by side."""

    out: Value
    x: Value
    scores: Value
    gathered: Value
    hidden: Value
    results: Value
    gate_up: NativeExperts
    down: NativeExperts
    spec: ExpertsSpec


@dataclass(frozen=True, slots=True)
class Glu:
    out: Value
    x: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class Activate:
    out: Value
    x: Value
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    out: Value
    x: Value
    y: Value
    scale: float


@dataclass(frozen=True, slots=True)
class Scale:
    out: Value
    x: Value
    factor: float


@dataclass(frozen=True, slots=True)
class GateNode:
    """out = x * sigmoid(scores), of which there is one for each row."""

    out: Value
    x: Value
    scores: Value


@dataclass(frozen=True, slots=True)
class SoftCap:
    out: Value
    x: Value
    cap: float


@dataclass(frozen=True, slots=True)
class Clamp:
    out: Value
    x: Value
    limit: float


@dataclass(frozen=True, slots=True)
class Columns:
    out: Value
    x: Value
    first: int


@dataclass(frozen=True, slots=True)
class Join:
    out: Value
    x: Value
    y: Value


@dataclass(frozen=True, slots=True)
class Multiply:
    """out = x * activation(y)."""

    out: Value
    x: Value
    y: Value
    activation: Activation | None


@dataclass(frozen=True, slots=True, eq=False)
class GroupNorm:
    out: Value
    x: Value
    weight: NDArray[np.float32]
    eps: float
    size: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Streams of x by weights, of which each row has some for each stream of out."""

    out: Value
    x: Value
    weights: Value
    num_inputs: int
    offset: float


@dataclass(frozen=True, slots=True)
class MatchRms:
    out: Value
    x: Value
    like: Value
    floor: float


@dataclass(frozen=True, slots=True)
class Sparsify:
    out: Value
    x: Value
    deviations: float


@dataclass(frozen=True, slots=True, eq=False)
class ScaleColumns:
    out: Value
    x: Value
    factors: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ShortConv:
    out: Value
    x: Value
    spec: ConvSpec


@dataclass(frozen=True, slots=True, eq=False)
class SsdScan:
    out: Value
    xbc: Value
    dt: Value
    spec: SsdSpec


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveScan:
    out: Value
    x: Value
    dt: Value
    b: Value
    c: Value
    spec: SelectiveSpec


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRule:
    out: Value
    qkv: Value
    gates: Value
    spec: DeltaSpec


@dataclass(frozen=True, slots=True)
class Convert:
    """The same numbers rounded to another dtype."""

    out: Value
    x: Value


@dataclass(frozen=True, slots=True)
class SelectRows:
    out: Value
    x: Value


@dataclass(frozen=True, slots=True)
class FeaturesNode:
    out: Value


@dataclass(frozen=True, slots=True)
class ShiftRows:
    """Each row is the one before it of its sequence, the first zeros."""

    out: Value
    x: Value


@dataclass(frozen=True, slots=True)
class StoreCross:
    """What x has of keys and values goes to the cross cache; `out` is a column that no other
    instruction reads."""

    out: Value
    x: Value
    spec: CrossSpec


@dataclass(frozen=True, slots=True)
class CrossAttentionNode:
    out: Value
    q: Value
    spec: CrossSpec


@dataclass(frozen=True, slots=True)
class PoolRows:
    out: Value
    x: Value
    how: Pool


Instruction: TypeAlias = (
    Embed
    | InputRows
    | Linear
    | RmsNorm
    | LayerNorm
    | AttentionNode
    | LatentAttentionNode
    | Moe
    | Glu
    | Activate
    | Add
    | Scale
    | GateNode
    | SoftCap
    | Clamp
    | Convert
    | SelectRows
    | PoolRows
    | FeaturesNode
    | ShiftRows
    | StoreCross
    | CrossAttentionNode
    | Columns
    | Join
    | Multiply
    | GroupNorm
    | Mix
    | MatchRms
    | Sparsify
    | ScaleColumns
    | ShortConv
    | SsdScan
    | SelectiveScan
    | DeltaRule
)


class Graph(NamedTuple):
    """Instructions in the order they run, the value that is the result, and values that are read
    beside it."""

    instructions: tuple[Instruction, ...]
    result: Value
    kept: tuple[tuple[str, Value], ...] = ()

    @property
    def outputs(self) -> list[Value]:
        """All values that are read behind the last instruction."""
        return [self.result, *(value for _, value in self.kept)]


def written(instruction: Instruction) -> list[Value]:
    if isinstance(instruction, Moe):
        return [instruction.gathered, instruction.hidden, instruction.results, instruction.out]
    if isinstance(instruction, LatentAttentionNode):
        return [instruction.nope, instruction.mixed, instruction.out]
    if isinstance(instruction, Linear) and instruction.u is not None:
        return [instruction.u, instruction.out]
    total = instruction.total if isinstance(instruction, (RmsNorm, LayerNorm)) else None
    return [instruction.out] if total is None else [total, instruction.out]


def read(instruction: Instruction) -> list[Value]:
    """In the order of the instruction's fields; a value may stand there twice."""
    outputs = written(instruction)
    values = (getattr(instruction, field.name) for field in fields(instruction))
    return [value for value in values if isinstance(value, Value) and value not in outputs]


def takes_over(instruction: Instruction) -> tuple[Value, Value] | None:
    """The value written, and the value read whose memory it is written to."""
    if isinstance(instruction, Linear) and instruction.onto is not None:
        return instruction.out, instruction.onto
    if isinstance(instruction, (RmsNorm, LayerNorm)) and instruction.total is not None:
        return instruction.total, instruction.x
    return None


def last_reads(instructions: Iterable[Instruction]) -> dict[Value, int]:
    """Where each value is read for the last time."""
    return {value: i for i, instruction in enumerate(instructions) for value in read(instruction)}


def substitute(instruction: Instruction, values: Mapping[Value, Value]) -> Instruction:
    """The instruction over other values."""
    changes = {
        field.name: values[value]
        for field in fields(instruction)
        if isinstance(value := getattr(instruction, field.name), Value) and value in values
    }
    return replace(instruction, **changes)  # type: ignore[arg-type]  # by the fields' own names
