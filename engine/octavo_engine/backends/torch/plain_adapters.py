"""What adapters add to a linear layer's results, in plain torch: Triton's kernels must equal it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.torch.adapter_tiles import ENTRY_WORDS, UNIT

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_adapters import Arenas, DeviceSite
    from octavo_engine.backends.torch.device_step import DeviceStep


def add_adapters(y: Tensor, x: Tensor, site: DeviceSite, arenas: Arenas, step: DeviceStep) -> None:
    """y [T, outputs] += scale * (x [T, columns] · Aᵀ) · Bᵀ, each row by its own adapter."""
    assert step.adapter_tiles is not None and step.adapter_rows is not None
    tiles = step.adapter_rows.view(len(step.adapter_tiles), -1)
    for number, arena in enumerate(step.adapter_tiles.tolist()):
        if arena < 0:
            continue
        rows = tiles[number]
        rows = rows[rows >= 0].long()
        given, place = x[rows].float(), 0
        for part, size in enumerate(site.sizes):
            first = (site.first_part + part) * ENTRY_WORDS
            rank, down_at, up_at = arenas.words[arena, first : first + 3].tolist()
            columns = slice(place, place + size)
            place += size
            if not rank:
                continue
            values = arenas.values[arena]
            down = values[down_at * UNIT :][: rank * site.columns].view(rank, site.columns)
            up = values[up_at * UNIT :][: rank * size].view(size, rank)
            shrunken = (given @ down.float().t()).to(x.dtype)
            added = arenas.floats[arena, first + 3] * (shrunken.float() @ up.float().t())
            y[rows, columns] = (y[rows, columns].float() + added).to(y.dtype)
