"""From a file's blocks to weights as kernels want them, by torch operations on the device itself.

GPTQ, AWQ and compressed-tensors come as Q4_1 and Q8_0 (`weights/quantized.py`), so that these and
GGUF's own are one case: blocks of 32 columns. Groups that were larger in the file are found again
by their equal scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo_engine.backends.torch.packed import FP8, GroupedWeight, ScaledWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK = 32
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
HALVES = (64, 32, 16)


class Blocks(NamedTuple):
    """Integers [rows, columns] with float16 scales, and minima if any, of blocks of 32."""

    q: Tensor  # uint8; of 8 bits int8
    scales: Tensor
    minima: Tensor | None


def read_blocks(raw: Tensor, dtype: str, num_rows: int) -> Blocks:
    """The bytes of a GGUF type in BLOCK_BYTES."""
    blocks = raw.view(num_rows, -1, BLOCK_BYTES[dtype])
    scales = _halves(blocks, 0)
    if dtype == "Q8_0":
        return Blocks(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scales, None)
    nibbles = blocks[..., 4:] if dtype == "Q4_1" else blocks[..., 2:]
    q = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).flatten(1)
    minima = _halves(blocks, 2) if dtype == "Q4_1" else scales * -8
    return Blocks(q, scales, minima)


def stacked(parts: Sequence[Blocks]) -> Blocks:
    """One below the other; all with minima or none."""
    minima = [part.minima for part in parts if part.minima is not None]
    return Blocks(
        torch.cat([part.q for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )


def grouped(blocks: Blocks, order: Tensor | None = None) -> GroupedWeight:
    """In as large groups as the scales allow, and without minima where they say nothing."""
    q, scales, minima = blocks
    num_rows, columns = q.shape
    bits = 8 if q.dtype == torch.int8 else 4
    if minima is not None and bool((minima == scales * -8).all()):
        minima = None
    per_group = _blocks_per_group(scales, minima)
    scales = by_groups(scales[:, ::per_group])
    minima = None if minima is None else by_groups(minima[:, ::per_group])
    group_size = per_group * BLOCK
    half = next(n for n in HALVES if columns % (2 * n) == 0 and group_size % n == 0)
    if bits == 4:
        tiles = q.view(num_rows, -1, 2, half)
        q = (tiles[:, :, 0] | tiles[:, :, 1] << 4).view(num_rows, -1).view(torch.int8)
    return GroupedWeight(q.contiguous(), scales, minima, bits, half, order)


def by_groups(scales: Tensor) -> Tensor:
    """The same [rows, groups], with those of a group side by side: programs read them so."""
    return scales.t().contiguous().t()


def whole_rows(blocks: Blocks) -> ScaledWeight | None:
    """int8 with one scale a row; None if the rows have several."""
    q, scales, minima = blocks
    if q.dtype != torch.int8 or minima is not None or bool((scales != scales[:, :1]).any()):
        return None
    return ScaledWeight(q, scales[:, :1].float(), q.shape[1])


def scaled(values: Sequence[Tensor], scales: Sequence[Tensor], block: int) -> ScaledWeight:
    """FP8 matrices one below the other; `scales` [rows, column blocks] of each."""
    return ScaledWeight(
        torch.cat([part.view(torch.uint8) for part in values]).view(FP8), torch.cat(list(scales)),
        block,
    )  # fmt: skip


def _halves(blocks: Tensor, start: int) -> Tensor:
    """A float16 of each block."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _blocks_per_group(scales: Tensor, minima: Tensor | None) -> int:
    """The most of those that divide a row and share scale and minimum."""
    num_blocks = scales.shape[1]
    for count in (num_blocks, 4, 2):
        if num_blocks % count == 0 and all(
            bool((part.view(len(part), -1, count) == part[:, ::count, None]).all())
            for part in (scales, minima)
            if part is not None
        ):
            return count
    return 1
