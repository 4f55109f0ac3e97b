"""What each layer of a model remembers of a text, and how layers share the pages of one pool.

A page holds 16 tokens. Layers that forget alike form *groups*, each with block tables of its own; a
page belongs to one group at a time and then holds 16 tokens of that group's layers. Pages of all
groups have the same size, so one pool serves them all, and blocks that left a window can hold what
another group needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


CacheSpec: TypeAlias = KVSpec | LatentSpec


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
    does."""

    specs: tuple[CacheSpec, ...]
    groups: tuple[CacheGroup, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each group: how many of its last tokens a sequence needs there."""
        return tuple(group.window for group in self.groups)

    def places(self) -> tuple[LayerPlace, ...]:
        """Of each layer."""
        found = {
            layer: LayerPlace(index, region)
            for index, group in enumerate(self.groups)
            for region, layer in enumerate(group.layers)
        }
        return tuple(found[layer] for layer in range(len(self.specs)))

    def page_bytes(self, bytes_of: Callable[[CacheSpec], int]) -> int:
        """Of one page, where a layer takes `bytes_of` its spec: a region is as large as the largest
        part that lies in it."""
        regions: dict[int, int] = {}
        for spec, place in zip(self.specs, self.places(), strict=True):
            regions[place.region] = max(regions.get(place.region, 0), bytes_of(spec))
        return sum(regions.values())


def one_group(specs: Sequence[CacheSpec]) -> CacheLayout:
    """Every layer keeps all tokens, whatever its window: for devices with one block table."""
    return CacheLayout(tuple(specs), (CacheGroup(None, tuple(range(len(specs)))),))


def group_layers(specs: Sequence[CacheSpec]) -> CacheLayout:
    """Layers of equal windows in groups of so many that little of a page stays empty.

    A group of fewer layers than a page has regions wastes the rest of its pages. So the layers of a
    window are cut into several groups where those of another are fewer. Padding of pages that hold
    all tokens weighs most: those are the ones that grow with a text.
    """
    classes: dict[int | None, list[int]] = {}
    for index, spec in enumerate(specs):
        classes.setdefault(spec.window, []).append(index)
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
