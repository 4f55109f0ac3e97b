"""What each layer of a model remembers of a text, and how layers share the pages of one pool.

A page holds 16 tokens. Layers that forget alike form *groups*, each with block tables of its own; a
page belongs to one group at a time and then holds 16 tokens of that group's layers. Pages of all
groups have the same size, so one pool serves them all, and blocks that left a window can hold what
another group needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Tokens from one snapshot of recurrent states to the next, from a text's beginning on.
STATE_STRIDE = 256
# In the place of a group's number, where blocks are named: the states behind a block.
STATE_GROUP = 255

MAX_GROUPS = (
    8  # each has tables to keep: more would cost every step more than the padding they save
)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of a layer's tokens, by heads."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a token sees, itself included; None: all before it


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent state in float32, of equal size however long a text is: the last inputs of a
    convolution, then what a scan has summed up."""

    conv: tuple[int, int]  # inputs, channels
    scan: tuple[int, int, int] = (0, 0, 0)  # heads, rows, columns

    @property
    def scan_offset(self) -> int:
        """Where the scan's part begins: at a cache line."""
        return -(-math.prod(self.conv) // 16) * 16

    @property
    def num_values(self) -> int:
        return self.scan_offset + math.prod(self.scan)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One vector a token, which all heads share: `rank` numbers, that are its values too, and
    `rope_dim` more of its key."""

    rank: int
    rope_dim: int
    window: int | None = None

    @property
    def dim(self) -> int:
        """Numbers a token."""
        return self.rank + self.rope_dim


PagedSpec: TypeAlias = KVSpec | LatentSpec  # what lies in pages of 16 tokens
CacheSpec: TypeAlias = PagedSpec | StateSpec


class CacheGroup(NamedTuple):
    """Layers that share block tables; the n-th of them lies in the n-th region of a page."""

    window: int | None
    layers: tuple[int, ...]


class LayerPlace(NamedTuple):
    """Where a layer's part of a page is."""

    group: int
    region: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All layers, by groups. The first group is the one that holds most: all tokens, if any
    does. Layers with a recurrent state are in none: their states have memory of their own."""

    specs: tuple[CacheSpec, ...]
    groups: tuple[CacheGroup, ...]

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Of the layers that have one, in their order."""
        return tuple(spec for spec in self.specs if isinstance(spec, StateSpec))

    @property
    def state_bytes(self) -> int:
        """Of one sequence, or one snapshot."""
        return sum(4 * -(-spec.num_values // 16) * 16 for spec in self.states)

    def ordinals(self) -> tuple[int, ...]:
        """Of each layer: its number among those with a state, or among the others."""
        counts = {True: 0, False: 0}
        numbers = []
        for spec in self.specs:
            kind = isinstance(spec, StateSpec)
            numbers.append(counts[kind])
            counts[kind] += 1
        return tuple(numbers)

    def paged(self) -> list[tuple[PagedSpec, LayerPlace]]:
        """The layers that lie in pages."""
        places = zip(self.specs, self.places(), strict=True)
        return [(spec, place) for spec, place in places if not isinstance(spec, StateSpec)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group: how many of its last tokens a sequence needs there."""
        return tuple(group.window for group in self.groups)

    def places(self) -> tuple[LayerPlace, ...]:
        """Of each layer; of one with a state there is none."""
        found = {
            layer: LayerPlace(index, region)
            for index, group in enumerate(self.groups)
            for region, layer in enumerate(group.layers)
        }
        nowhere = LayerPlace(-1, -1)
        return tuple(found.get(layer, nowhere) for layer in range(len(self.specs)))

    def part(self, layers: range) -> CacheLayout:
        """Of some layers by themselves. There are as many groups, so that block tables stay; some
        may be empty."""
        numbers = {layer: number for number, layer in enumerate(layers)}
        groups = tuple(
            CacheGroup(group.window, tuple(numbers[i] for i in group.layers if i in numbers))
            for group in self.groups
        )
        return CacheLayout(self.specs[layers.start : layers.stop], groups)

    def page_bytes(self, bytes_of: Callable[[PagedSpec], int]) -> int:
        """Of one page, where a layer takes `bytes_of` its spec: a region is as large as the largest
        part that lies in it."""
        regions: dict[int, int] = {}
        for spec, place in self.paged():
            regions[place.region] = max(regions.get(place.region, 0), bytes_of(spec))
        return sum(regions.values())


def one_group(specs: Sequence[CacheSpec]) -> CacheLayout:
    """Every layer keeps all tokens, whatever its window: for devices with one block table."""
    layers = [index for index, spec in enumerate(specs) if not isinstance(spec, StateSpec)]
    return CacheLayout(tuple(specs), (CacheGroup(None, tuple(layers)),))


def group_layers(specs: Sequence[CacheSpec]) -> CacheLayout:
    """Layers of equal windows in groups of so many that little of a page stays empty.

    A group of fewer layers than a page has regions wastes the rest of its pages. So the layers of a
    window are cut into several groups where those of another are fewer. Padding of pages that hold
    all tokens weighs most: those are the ones that grow with a text.
    """
    classes: dict[int | None, list[int]] = {}
    for index, spec in enumerate(specs):
        if not isinstance(spec, StateSpec):
            classes.setdefault(spec.window, []).append(index)
    if not classes:
        return one_group(specs)  # its pages are empty; they name a prefix's blocks all the same
    ordered = sorted(classes.items(), key=lambda item: _reach(item[0]), reverse=True)
    counts = [len(layers) for _, layers in ordered]
    size = min(range(1, max(counts) + 1), key=lambda size: _waste(counts, size))
    groups = [
        CacheGroup(window, tuple(layers[start : start + size]))
        for window, layers in ordered
        for start in range(0, len(layers), size)
    ]
    return CacheLayout(tuple(specs), tuple(groups))


def _reach(window: int | None) -> float:
    return float("inf") if window is None else window


def _waste(counts: list[int], size: int) -> tuple[bool, int, int, int]:
    """How bad groups of `size` layers are, for classes of so many: the first holds most tokens."""
    num_groups = [-(-count // size) for count in counts]
    empty = [groups * size - count for groups, count in zip(num_groups, counts, strict=True)]
    is_many = sum(num_groups) > max(MAX_GROUPS, len(counts))
    return is_many, empty[0], sum(empty), sum(num_groups)
