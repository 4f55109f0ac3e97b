"""Fewer and cheaper instructions with the same bits: pure functions from graph to graph.

Two adjacent instructions become one where the first only works for the second:

    linear, glu      → linear (glu)         halves of whole panels
    linear, activate → linear (activation)  what is written is not read again
    linear, add      → linear (onto)        the residual is not read again
    add, norm        → norm (add)           the residual is not read again

Adjacent ones only: so nothing moves past an instruction that takes over the memory of what it
reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from octavo_engine.backends.native.graph import (
    Activate,
    Add,
    AttentionNode,
    Clamp,
    Convert,
    CrossAttentionNode,
    FeaturesNode,
    Glu,
    LayerNorm,
    Linear,
    RmsNorm,
    Scale,
    SoftCap,
    last_reads,
    read,
    substitute,
)
from octavo_engine.backends.native.packing import PANEL_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.native.graph import Dtype, Graph, Instruction, Value

    _PairFusion: TypeAlias = Callable[[Instruction, Instruction], Instruction | None]


def fuse(graph: Graph) -> Graph:
    """Every fusion that applies."""
    for fusion in (fuse_glu, fuse_activation, fuse_residual, fuse_norm):
        graph = fusion(graph)
    return graph


def fuse_glu(graph: Graph) -> Graph:
    """A linear that is only read by a glu writes the glu's result."""
    uses = _Uses(graph)

    def fused(first: Instruction, second: Instruction) -> Instruction | None:
        if not (isinstance(first, Linear) and isinstance(second, Glu)):
            return None
        if second.x != first.out or not uses.is_read_once(first.out):
            return None
        weight = first.linear.weight
        if first.onto is not None or weight.rows % (2 * PANEL_ROWS):
            return None
        if weight.is_cut and not weight.of_halves:
            return None
        return replace(first, out=second.out, glu=second.activation)

    return _fuse_pairs(graph, fused)


def fuse_activation(graph: Graph) -> Graph:
    """A linear that is only read by an activation writes the activation's result."""
    uses = _Uses(graph)

    def fused(first: Instruction, second: Instruction) -> Instruction | None:
        if not (isinstance(first, Linear) and isinstance(second, Activate)):
            return None
        if second.x != first.out or not uses.is_read_once(first.out):
            return None
        if first.onto is not None or first.glu is not None:
            return None
        return replace(first, out=second.out, activation=second.activation)

    return _fuse_pairs(graph, fused)


def fuse_residual(graph: Graph) -> Graph:
    """A linear that is only added to a residual adds itself, in the residual's memory."""
    uses = _Uses(graph)

    def fused(first: Instruction, second: Instruction) -> Instruction | None:
        if not (isinstance(first, Linear) and isinstance(second, Add)):
            return None
        if second.y != first.out or not uses.is_read_once(first.out):
            return None
        if first.glu is not None or first.activation is not None or first.onto is not None:
            return None
        onto = second.x
        if onto in (first.x, first.out) or not uses.is_last_read(onto, second):
            return None
        return replace(first, out=second.out, onto=onto, scale=second.scale)

    return _fuse_pairs(graph, fused)


def fuse_norm(graph: Graph) -> Graph:
    """A norm of a sum makes the sum too, in the memory of its first summand."""
    uses = _Uses(graph)

    def fused(first: Instruction, second: Instruction) -> Instruction | None:
        if not (isinstance(first, Add) and isinstance(second, (RmsNorm, LayerNorm))):
            return None
        if second.x != first.out or first.x == first.y or not uses.is_last_read(first.x, first):
            return None
        return replace(second, x=first.x, add=first.y, add_scale=first.scale, total=first.out)

    return _fuse_pairs(graph, fused)


def settle_dtypes(graph: Graph, *, elide: bool = True) -> Graph:
    """Give each linear its input in its weight's dtype.

    With `elide`, an instruction that writes a value which only such linears read writes it rounded;
    otherwise a conversion goes before the first of them.
    """
    wanted: dict[Value, set[Dtype]] = defaultdict(set)
    for instruction in graph.instructions:
        for value in read(instruction):
            wanted[value].add(_wanted_dtype(instruction, value))
    for value in graph.outputs:
        wanted[value].add("f32")
    next_id = 1 + max(value.id for value in wanted)

    rounded: dict[Value, Value] = {}  # the bf16 twin of a value, or what took its place
    settled: list[Instruction] = []
    for instruction in graph.instructions:
        for value in read(instruction):
            if _wanted_dtype(instruction, value) == "bf16" and value not in rounded:
                rounded[value] = replace(value, id=next_id, dtype="bf16")
                settled.append(Convert(rounded[value], value))
                next_id += 1
        out = instruction.out
        if elide and wanted[out] == {"bf16"} and _can_round(instruction):
            rounded[out] = replace(out, dtype="bf16")
            settled.append(_over_rounded(replace(instruction, out=rounded[out]), rounded))
        else:
            settled.append(_over_rounded(instruction, rounded))
    return graph._replace(instructions=tuple(settled))


class _Uses:
    """How often each value is read, and by whom last; outputs are also read after the end."""

    def __init__(self, graph: Graph) -> None:
        self._instructions = graph.instructions
        self._counts = Counter(v for i in graph.instructions for v in read(i))
        self._counts.update(graph.outputs)
        self._last = last_reads(graph.instructions)
        for value in graph.outputs:
            self._last.pop(value, None)

    def is_read_once(self, value: Value) -> bool:
        return self._counts[value] == 1

    def is_last_read(self, value: Value, by: Instruction) -> bool:
        return value in self._last and self._instructions[self._last[value]] is by


def _fuse_pairs(graph: Graph, fused: _PairFusion) -> Graph:
    instructions: list[Instruction] = []
    for instruction in graph.instructions:
        one = fused(instructions[-1], instruction) if instructions else None
        if one is None:
            instructions.append(instruction)
        else:
            instructions[-1] = one
    return graph._replace(instructions=tuple(instructions))


def _wanted_dtype(instruction: Instruction, value: Value) -> Dtype:
    if isinstance(instruction, Linear) and value == instruction.x:
        return "bf16" if instruction.linear.weight.dtype == "bf16" else "f32"
    return "f32"


def _can_round(instruction: Instruction) -> bool:
    if isinstance(instruction, Linear):
        return instruction.glu is not None or instruction.activation is not None
    return isinstance(
        instruction,
        (
            RmsNorm,
            LayerNorm,
            AttentionNode,
            CrossAttentionNode,
            FeaturesNode,
            Glu,
            Activate,
            Scale,
            SoftCap,
            Clamp,
        ),
    )


def _over_rounded(instruction: Instruction, rounded: dict[Value, Value]) -> Instruction:
    if not isinstance(instruction, Linear) or _wanted_dtype(instruction, instruction.x) != "bf16":
        return instruction
    return substitute(instruction, {instruction.x: rounded[instruction.x]})
