"""What part of a model one of several stages has: some layers, and what stands before or behind
them. Pure.

A model is written down whole and then cut where it keeps the rows behind a layer. So no model's
page knows of stages; a stage holds what its instructions read, and a model whose layers use more
than the rows that the layer before them left is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.backends.native.graph import Embed, InputRows, Value, read, written
from octavo_engine.errors import ConfigError
from octavo_engine.ops import layer_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from octavo_engine.backends.native.graph import Graph, Instruction


class StagePlace(NamedTuple):
    """One stage of so many. `layers`: how many each has; None: as many as make their work equal."""

    stage: int
    num_stages: int
    layers: tuple[int, ...] | None = None
    has_host: bool = False  # of its own

    @property
    def on_host(self) -> tuple[int, int]:
        """Which stage it is of so many on its host."""
        return (0, 1) if self.has_host else (self.stage, self.num_stages)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


@dataclass(frozen=True, slots=True)
class AbsentMatrix:
    """In place of a packed matrix that another stage has: what a model's page needs to be written
    down all the same."""

    names: tuple[str, ...]
    total_rows: int
    cols: int
    dtype: str = "f32"
    is_cut: bool = False
    of_halves: bool = False

    @property
    def rows(self) -> int:
        return self.total_rows


class StageCut(NamedTuple):
    """The layers of each stage, which of them is this one, and the matrices that it reads."""

    place: StagePlace
    bounds: tuple[int, ...]  # stage i has the layers [bounds[i], bounds[i + 1])
    names: frozenset[str]

    @property
    def layers(self) -> range:
        return range(self.bounds[self.place.stage], self.bounds[self.place.stage + 1])

    def apply(self, graph: Graph) -> Graph:
        return _part(graph, self.layers, self.bounds[-1])


def layer_names(num_layers: int) -> list[str]:
    """What a graph must keep to be cut."""
    return [layer_output(index) for index in range(num_layers)]


def plan_cut(graph: Graph, place: StagePlace, *, num_layers: int, what: str) -> StageCut:
    """`graph` is the whole model over absent matrices; `what` names it in errors. Raises
    ConfigError where it cannot be cut so."""
    if place.num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {place.num_stages} is more than the {num_layers} layers of "
            f"{what}; use {num_layers} or fewer"
        )
    missing = set(layer_names(num_layers)) - {name for name, _ in graph.kept}
    if missing:
        raise ConfigError(
            f"--pipeline-parallel-size {place.num_stages}: {what} cannot be cut between its "
            "layers; leave it out"
        )
    costs = [_products(_part(graph, range(i, i + 1), num_layers)) for i in range(num_layers)]
    bounds = _bounds(place, costs)
    for stage in range(place.num_stages):
        _check_part(graph, range(bounds[stage], bounds[stage + 1]), num_layers, place, what)
    own = _part(graph, range(bounds[place.stage], bounds[place.stage + 1]), num_layers)
    names = frozenset(name for matrix in _matrices(own) for name in matrix.names)
    return StageCut(place, bounds, names)


def layer_kinds(graph: Graph, num_layers: int) -> list[tuple[object, ...]]:
    """Of each layer what its instructions are and which matrices they read: layers of one kind take
    the same time. `graph` is the whole model over absent matrices, kept behind each layer."""
    return [
        tuple(
            (
                type(instruction).__name__,
                tuple((matrix.total_rows, matrix.cols) for matrix in _matrices_in(instruction)),
            )
            for instruction in _part(graph, range(layer, layer + 1), num_layers).instructions
        )
        for layer in range(num_layers)
    ]


def parse_layers(text: str | None, count: int) -> tuple[int, ...] | None:
    """Such as 12,14,6. Raises ConfigError."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or len(parts) != count:
        raise ConfigError(
            "--pipeline-layer-partition must be a number of layers for each of the "
            f"{count} stages, such as {','.join(['8'] * count)}, or measured; got {text}"
        )
    return tuple(int(part) for part in parts)


def balance(costs: Sequence[int], count: int) -> list[int]:
    """How many of these things, in their order, each of `count` parts gets so that the costliest
    part is as cheap as it can be. Each gets one at least."""
    lowest, highest = max(costs), sum(costs)
    while lowest < highest:
        middle = (lowest + highest) // 2
        if len(_filled(costs, middle, count)) <= count:
            highest = middle
        else:
            lowest = middle + 1
    return _filled(costs, lowest, count)


def _filled(costs: Sequence[int], most: int, count: int) -> list[int]:
    """Parts of at most that cost, filled one after another; the last things are left to the parts
    that have none yet."""
    sizes, cost = [0], 0
    for index, one in enumerate(costs):
        are_left = len(costs) - index
        if sizes[-1] and (cost + one > most or are_left == count - len(sizes)):
            sizes.append(0)
            cost = 0
        sizes[-1] += 1
        cost += one
    return sizes


def _bounds(place: StagePlace, costs: Sequence[int]) -> tuple[int, ...]:
    sizes = place.layers
    if sizes is None:
        sizes = tuple(balance(costs, place.num_stages))
    elif sum(sizes) != len(costs):
        raise ConfigError(
            f"--pipeline-layer-partition {','.join(map(str, sizes))} is of {sum(sizes)} layers; "
            f"the model has {len(costs)}"
        )
    return tuple(accumulate(sizes, initial=0))


def _part(graph: Graph, layers: range, num_layers: int) -> Graph:
    """The instructions of some layers. What stands before the first layer goes with it, and what
    stands behind the last with that."""
    kept = dict(graph.kept)
    ends = {instruction.out: i + 1 for i, instruction in enumerate(graph.instructions)}
    first, end, result = 0, len(graph.instructions), graph.result
    head: tuple[Instruction, ...] = ()
    if layers.start > 0:
        received = kept[layer_output(layers.start - 1)]
        first, head = ends[received], (InputRows(received),)
    if layers.stop < num_layers:
        result = kept[layer_output(layers.stop - 1)]
        end = ends[result]
    return graph._replace(instructions=head + graph.instructions[first:end], result=result, kept=())


def _check_part(graph: Graph, layers: range, num_layers: int, place: StagePlace, what: str) -> None:
    """Raises ConfigError where a part reads more than it is given."""
    known: set[Value] = set()
    for instruction in _part(graph, layers, num_layers).instructions:
        if not known.issuperset(read(instruction)):
            raise ConfigError(
                f"--pipeline-parallel-size {place.num_stages}: {what} cannot be cut before layer "
                f"{layers.start}: later layers read more than the output of the one before them; "
                "leave it out"
            )
        known.update(written(instruction))


def _products(part: Graph) -> int:
    """Numbers that a token meets in products: what a step of a few tokens takes its time for."""
    return sum(
        math.prod((matrix.total_rows, matrix.cols))
        for instruction in part.instructions
        if not isinstance(instruction, Embed)
        for matrix in _matrices_in(instruction)
    )


def _matrices(graph: Graph) -> Iterator[AbsentMatrix]:
    for instruction in graph.instructions:
        yield from _matrices_in(instruction)


def _matrices_in(instruction: Instruction) -> Iterator[AbsentMatrix]:
    for field in fields(instruction):
        yield from _absent(getattr(instruction, field.name))


def _absent(value: object) -> Iterator[AbsentMatrix]:
    if isinstance(value, AbsentMatrix):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from _absent(entry)
