"""What part of a model one of several ranks has: some outputs of each layer, some heads. Pure.

Only outputs are cut, never what is summed over: each output is then one chain of sums whatever the
number of ranks, and an answer's bits are those of one process.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.backends.native.packing import PANEL_ROWS
from octavo_engine.caches import LatentSpec, StateSpec
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.caches import CacheLayout, PagedSpec

# The first of two halves of equal size, which meet column by column in a glu.
_GATED = (".gate_proj", ".gate_up_proj", ".w1")


class Shard(NamedTuple):
    """One rank of so many."""

    rank: int = 0
    size: int = 1

    def all(self) -> list[Shard]:
        """Every rank's."""
        return [Shard(rank, self.size) for rank in range(self.size)]


class RankPlace(NamedTuple):
    """Where a rank stands among those that compute together, and what they share."""

    shard: Shard
    file: int  # a descriptor of memory that all ranks map
    patience_s: float  # for the slowest rank at a barrier


class HeadShard(NamedTuple):
    """The heads that a rank computes, and the KV heads that it keeps for them."""

    first_head: int
    num_heads: int
    first_kv_head: int
    num_kv_heads: int


class Piece(NamedTuple):
    """Some rows of one of the matrices that lie one below the other."""

    matrix: int
    first: int
    end: int


class RowCut(NamedTuple):
    """A rank's rows of a matrix: from the first one on, or that in each of its two halves."""

    ranges: tuple[tuple[int, int], ...]
    total: int

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.total),)

    @property
    def of_halves(self) -> bool:
        return len(self.ranges) == 2


def split(count: int, shard: Shard) -> tuple[int, int]:
    """The rank's share of so many things in a row; sizes differ by one at most."""
    return count * shard.rank // shard.size, count * (shard.rank + 1) // shard.size


def cut_rows(total: int, shard: Shard, *, of_halves: bool) -> RowCut:
    """Whole panels. A matrix with fewer of them than there are ranks is had by all as a whole."""
    of_halves = of_halves and total % (2 * PANEL_ROWS) == 0
    length = total // 2 if of_halves else total
    panels = -(-length // PANEL_ROWS)
    if shard.size == 1 or panels < shard.size:
        return RowCut(((0, total),), total)
    first, end = (min(length, panel * PANEL_ROWS) for panel in split(panels, shard))
    if not of_halves:
        return RowCut(((first, end),), total)
    return RowCut(((first, end), (length + first, length + end)), total)


def cut_linear(name: str, total: int, shard: Shard) -> RowCut:
    """The rank's outputs of a linear layer whose first matrix has this name."""
    return cut_rows(total, shard, of_halves=name.endswith(_GATED))


def pieces_of(cut: RowCut, sizes: Sequence[int]) -> list[Piece]:
    """The cut's rows by the matrices of these sizes that they are of, in their order."""
    starts = list(accumulate(sizes, initial=0))
    return [
        Piece(matrix, max(first, start) - start, min(end, start + size) - start)
        for first, end in cut.ranges
        for matrix, (start, size) in enumerate(zip(starts, sizes, strict=False))
        if max(first, start) < min(end, start + size)
    ]


def cut_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> HeadShard:
    """Whole KV heads with all heads that share them; where there are fewer KV heads than ranks,
    several ranks keep the same one and share its heads. Raises ConfigError."""
    rank, size = shard
    if size > num_heads:
        raise ConfigError(
            f"--tensor-parallel-size {size} is more than the model's {num_heads} attention heads; "
            f"use {num_heads} or fewer"
        )
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        first_kv, end_kv = split(num_kv_heads, shard)
        return HeadShard(first_kv * group, (end_kv - first_kv) * group, first_kv, end_kv - first_kv)
    kv_head = rank * num_kv_heads // size
    sharers = [r for r in range(size) if r * num_kv_heads // size == kv_head]
    first, end = split(group, Shard(sharers.index(rank), len(sharers)))
    return HeadShard(kv_head * group + first, end - first, kv_head, 1)


def own_cache(spec: PagedSpec, num_heads: int, shard: Shard) -> PagedSpec:
    """What a rank keeps of a layer's cache. Raises ConfigError."""
    if isinstance(spec, LatentSpec):  # whole, whatever heads the rank has
        cut_heads(num_heads, 1, shard)
        return spec
    own = cut_heads(num_heads, spec.num_kv_heads, shard)
    return dataclasses.replace(spec, num_kv_heads=own.num_kv_heads)


def own_layout(layout: CacheLayout, num_heads: int, shard: Shard) -> CacheLayout:
    """What a rank keeps of all layers' caches. Raises ConfigError."""
    own = [s if isinstance(s, StateSpec) else own_cache(s, num_heads, shard) for s in layout.specs]
    return dataclasses.replace(layout, specs=tuple(own))
