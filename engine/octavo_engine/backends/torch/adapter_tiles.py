"""How the products of adapters are cut: a step's rows in tiles of one adapter each, on the host.

A tile names its rows, so rows of one adapter need not lie together, and a row without an adapter is
in no tile. Cuts depend on the number of tokens alone (or on nothing, for batch-invariant results):
a captured step fits every mixture of adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FEW_TOKENS = 512  # up to so many a step is cut for many adapters with few rows each
FEW_ROWS, MANY_ROWS = 16, 64  # of a tile
RANKS = 16  # ranks are padded to multiples of it
INPUTS = 128  # what cuts of the inputs are multiples of
BLOCK_OUTPUTS = 128  # that one program adds to
UNIT = 16  # values that places of matrices are counted in
ENTRY_WORDS = 4  # of a part of a layer: rank, places of A and B, scale
LEAST_INPUTS = 512  # of a part: shorter ones end before they have begun
FEW_SPLITS, INVARIANT_SPLITS = 16, 4


class AdapterTiles(NamedTuple):
    """Which adapter each tile adds, and the rows it adds to."""

    arenas: NDArray[np.int32]  # [tiles]
    rows: NDArray[np.int32]  # [tiles * rows of one]; -1: padding


class Split(NamedTuple):
    """How the inputs of a product are cut."""

    num_parts: int
    num_inputs: int  # of each part but the last


class AdapterCut(NamedTuple):
    """What cuts depend on."""

    num_slots: int = 0  # 0: there are no adapters
    batch_invariant: bool = False

    def rows_per_tile(self, num_tokens: int) -> int:
        return FEW_ROWS if self.batch_invariant or num_tokens <= FEW_TOKENS else MANY_ROWS

    def tiles(self, num_tokens: int, num_seqs: int) -> int:
        """The most that a step may have: each adapter's last may be partly filled."""
        num_adapters = min(self.num_slots, num_seqs)
        return num_adapters + num_tokens // self.rows_per_tile(num_tokens)

    def most(self, max_tokens: int, max_seqs: int) -> tuple[int, int]:
        """Tiles and their rows, of any step within the limits."""
        if not self.num_slots:
            return 0, 0
        counts = {min(FEW_TOKENS, max_tokens), max_tokens}
        tiles = {count: self.tiles(count, max_seqs) for count in counts}
        return max(tiles.values()), max(n * self.rows_per_tile(at) for at, n in tiles.items())

    def split(self, num_inputs: int, num_tokens: int) -> Split:
        """Few rows have few tiles: the inputs are divided, so that all processors read."""
        most = FEW_SPLITS if num_tokens <= FEW_TOKENS else 1
        if self.batch_invariant:
            most = INVARIANT_SPLITS
        part = max(LEAST_INPUTS, -(-num_inputs // most))
        if most == 1:
            part = num_inputs
        part = -(-part // INPUTS) * INPUTS
        return Split(-(-num_inputs // part), part)

    def workspace_values(self, num_inputs: int, width: int, max_tokens: int) -> int:
        """Numbers that the parts of one product leave, at most; a row has `width` in each."""
        counts = {min(FEW_TOKENS, max_tokens), max_tokens}
        return max(self.split(num_inputs, n).num_parts * n * width for n in counts)


def cut_rows(arenas: NDArray[np.int32], rows_per_tile: int) -> AdapterTiles:
    """`arenas`: of each row's adapter; -1: it has none."""
    # Hot path: once per step that has adapters.
    order = np.argsort(arenas, kind="stable")
    order = order[np.searchsorted(arenas[order], 0) :]
    own = arenas[order]
    firsts = np.flatnonzero(np.diff(own, prepend=-1))  # where one adapter's rows begin
    kinds, counts = own[firsts], np.diff(firsts, append=len(own))
    num_tiles = -(-counts // rows_per_tile)
    rows = np.full(int(num_tiles.sum()) * rows_per_tile, -1, np.int32)
    first_places = (np.cumsum(num_tiles) - num_tiles) * rows_per_tile
    shifts = first_places - firsts
    rows[np.repeat(shifts, counts) + np.arange(len(order))] = order
    return AdapterTiles(np.repeat(kinds, num_tiles), rows)


def padded(count: int, multiple: int = RANKS) -> int:
    return -(-count // multiple) * multiple
