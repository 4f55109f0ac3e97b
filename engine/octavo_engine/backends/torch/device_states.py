"""Recurrent states on the device: slots that hold those of all layers, in one tensor.

A slot's layers lie behind one another, so that a snapshot is one copy however many layers there
are. Kernels change states in place; they find a sequence's slot in the step's own arrays, so a
captured graph serves any slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.caches import CacheLayout

ALIGNMENT = 16  # values: as `CacheLayout.state_bytes` counts them


class DeviceStates:
    """[slots, values of all layers], float32."""

    def __init__(self, layout: CacheLayout, num_slots: int, device: torch.device) -> None:
        self._ordinals = layout.ordinals()
        self._places: list[slice] = []
        end = 0
        for spec in layout.states:
            self._places.append(slice(end, end + spec.num_values))
            end += -(-spec.num_values // ALIGNMENT) * ALIGNMENT
        self._data = torch.zeros((num_slots, end), dtype=torch.float32, device=device)

    def layer(self, index: int) -> Tensor:
        """[slots, values] of a layer, by its index into the caches."""
        return self._data[:, self._places[self._ordinals[index]]]

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Rows (source slot, target slot); no source is a target."""
        for source, target in copies.tolist():
            self._data[target] = self._data[source]

    def save(self, slot: int) -> NDArray[np.uint8]:
        """All bytes, behind all that was launched."""
        saved: NDArray[np.uint8] = self._data[slot].to("cpu", copy=True).numpy().view(np.uint8)
        return saved

    def load(self, slot: int, page: NDArray[np.uint8]) -> None:
        """The opposite."""
        self._data[slot] = torch.from_numpy(page.view(np.float32)).to(self._data.device)

    def poison(self, slots: list[int]) -> None:
        self._data[slots] = torch.nan
