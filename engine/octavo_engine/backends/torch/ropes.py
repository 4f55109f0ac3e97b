"""Tables of angles on the device, one for each rope of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.ops import Rope


class DeviceRopeTables:
    """[positions, cosines then sines] in float32. A device's own quick sine is not exact enough."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self._num_positions = num_positions
        self._device = device
        self._made: dict[int, tuple[Rope, Tensor]] = {}  # the rope is kept, so its id is not reused

    def table(self, rope: Rope) -> Tensor:
        made = self._made.get(id(rope))
        if made is None:
            made = self._made[id(rope)] = (rope, self._make(rope))
        return made[1]

    def _make(self, rope: Rope) -> Tensor:
        inv_freq = torch.from_numpy(rope.inv_freq).to(self._device)
        positions = torch.arange(self._num_positions, device=self._device).float()
        angles = positions[:, None] * inv_freq
        return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
