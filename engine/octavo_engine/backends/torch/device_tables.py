"""The rows' block tables on the device, of each group of layers, and what was not sent yet.

A table grows by a block every 16 tokens, so most steps send nothing of it. Entries travel with the
step, as pairs of place and block, and are put in their places before its work; many at once, as of
a long prompt that was found in the cache, travel by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.backend import BackendStep


class TableChanges(NamedTuple):
    """Entries that the device does not have yet."""

    places: NDArray[np.int32]  # in the flat tables
    blocks: NDArray[np.int32]
    rows: NDArray[np.int32]  # that are up to date afterwards
    lengths: NDArray[np.int32]
    versions: NDArray[np.int64] | None


class DeviceTables:
    """[groups, rows, blocks], flat, and the host's memory of it."""

    def __init__(
        self, num_rows: int, width: int, device: torch.device, *, num_groups: int = 1
    ) -> None:
        self.width = width
        self.group_size = num_rows * width
        size = num_groups * self.group_size
        self.flat: Tensor = torch.zeros(size, dtype=torch.int32, device=device)
        self._sent = np.zeros((num_groups, num_rows, width), np.int32)
        # What of each row is known to be there: of which version, and how many entries.
        self._versions = np.full(num_rows, -1, np.int64)
        self._lengths = np.zeros(num_rows, np.int64)

    def starts(self, rows: NDArray[np.int32], group: int) -> NDArray[np.int32]:
        """Where in the flat tables those of these rows begin."""
        return rows * np.int32(self.width) + np.int32(group * self.group_size)

    def find_changes(self, step: BackendStep) -> TableChanges:
        """Of the rows of the step, as far as their sequences reach."""
        rows, lengths = step.rows, -(-step.seq_lens // BLOCK_SIZE)
        versions = None
        if step.table_versions is not None:
            versions = step.table_versions[rows]
            # A version may have more entries than an earlier step of it reached.
            is_new = (versions != self._versions[rows]) | (lengths > self._lengths[rows])
            rows, lengths, versions = rows[is_new], lengths[is_new], versions[is_new]
        width = int(lengths.max(initial=0))
        if not width:
            return TableChanges(
                np.empty(0, np.int32), np.empty(0, np.int32), rows[:0], lengths, None
            )
        tables = step.block_tables[:, rows, :width]
        differs = tables != self._sent[:, rows, :width]
        differs &= np.arange(width) < lengths[:, None]
        differs &= tables >= 0  # what left a window is not looked at
        groups, owners, columns = np.nonzero(differs)
        places = groups * self.group_size + rows[owners] * self.width + columns
        blocks = tables[groups, owners, columns]
        return TableChanges(places.astype(np.int32), blocks, rows, lengths, versions)

    def put(self, places: Tensor, blocks: Tensor) -> None:
        """`TableChanges` as they are on the device."""
        self.flat.index_copy_(0, places.long(), blocks)

    def sent(self, changes: TableChanges) -> None:
        """They are on their way, before whatever is launched from now on."""
        self._sent.reshape(-1)[changes.places] = changes.blocks
        if changes.versions is not None:
            self._versions[changes.rows] = changes.versions
            self._lengths[changes.rows] = changes.lengths
