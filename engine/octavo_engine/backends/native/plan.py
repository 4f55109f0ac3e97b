"""Where values lie in the arena: memory whose value is dead goes to the next. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.backends.native.graph import last_reads, takes_over, written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_engine.backends.native.graph import Graph, Value

ALIGNMENT = 64  # bytes; a cache line, and the widest vector


class Lifetime(NamedTuple):
    """A stretch of memory and the instructions, both included, between which it is in use."""

    num_bytes: int
    first: int
    last: int


class Placement(NamedTuple):
    offsets: list[int]
    num_bytes: int


class ArenaPlan(NamedTuple):
    """The offset of each value, and the size of the arena."""

    offsets: dict[Value, int]
    num_bytes: int


def plan_memory(graph: Graph, max_rows: Mapping[str, int]) -> ArenaPlan:
    """Places for all values of a graph; `max_rows` says how many rows T and S may be."""
    home: dict[Value, Value] = {}  # whose memory a value lies in
    lifetimes: dict[Value, Lifetime] = {}
    last = last_reads(graph.instructions)
    last |= dict.fromkeys(graph.outputs, len(graph.instructions))
    for index, instruction in enumerate(graph.instructions):
        taken = takes_over(instruction)
        for value in written(instruction):
            end = max(index, last.get(value, index))
            if taken is not None and value == taken[0]:
                home[value] = home[taken[1]]
                owner = lifetimes[home[value]]
                lifetimes[home[value]] = owner._replace(last=max(owner.last, end))
                continue
            home[value] = value
            lifetimes[value] = Lifetime(num_bytes(value, max_rows), index, end)
    placement = place(list(lifetimes.values()))
    offset_of = dict(zip(lifetimes, placement.offsets, strict=True))
    return ArenaPlan({value: offset_of[home[value]] for value in home}, placement.num_bytes)


def num_bytes(value: Value, max_rows: Mapping[str, int]) -> int:
    return max_rows[value.rows] * value.cols * (2 if value.dtype == "bf16" else 4)


def place(lifetimes: Sequence[Lifetime]) -> Placement:
    """Offsets such that no two that live at the same time overlap.

    Largest first, each into the lowest gap among those that live at its time: what is left for the
    small ones are the holes between the large ones.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].num_bytes):
        lifetime = lifetimes[index]
        offset = 0
        for other in sorted(placed, key=lambda i: offsets[i]):
            if lifetimes[other].first > lifetime.last or lifetimes[other].last < lifetime.first:
                continue
            if offset + lifetime.num_bytes <= offsets[other]:
                break
            offset = max(offset, _align(offsets[other] + lifetimes[other].num_bytes))
        offsets[index] = offset
        placed.append(index)
        total = max(total, _align(offset + lifetime.num_bytes))
    return Placement(offsets, total)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
