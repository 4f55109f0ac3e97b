"""What adapters add to a linear layer's results: one grouped pair of products for all of them.

A tile has rows of one adapter. The first kernel shrinks them to the adapter's ranks, in parts of
the inputs where there are few rows, so that more processors read; the second sums the parts in
their order, expands to the outputs and adds to what is there. Tiles of padding, and layers that an
adapter does not change, end at once; rows without an adapter are in no tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.adapter_tiles import (
    BLOCK_OUTPUTS,
    ENTRY_WORDS,
    MANY_ROWS,
    RANKS,
    UNIT,
)

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_adapters import Arenas, DeviceSite
    from octavo_engine.backends.torch.device_step import DeviceStep


class ShrinkTile(NamedTuple):
    """How much a program takes at a time."""

    block_r: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tile(rows: int, ranks: int) -> ShrinkTile:
    """Of the first kernel, and ranks of the second. `ranks`: of the highest adapter, padded."""
    if rows < MANY_ROWS:
        return ShrinkTile(RANKS, 128, num_warps=2, num_stages=4)
    block_r = next(size for size in (64, 32, RANKS) if ranks % size == 0)
    return ShrinkTile(block_r, 64, num_warps=4, num_stages=3)


@triton.jit(do_not_specialize=["first_part", "num_rows"])
def shrink_kernel(
    partials,  # float32 [splits, rows, PARTS * RANKS]
    x,  # [rows, num_inputs]
    values,  # [arenas, arena_values]
    words,  # [arenas, arena_words]
    tile_arenas,  # [tiles]; -1: padding
    tile_rows,  # [tiles * BLOCK_M]; -1: padding
    arena_values,
    arena_words,
    first_part,
    num_rows,
    num_inputs,
    split_inputs,
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    ENTRY: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # no block of inputs is partly filled
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    arena = tl.load(tile_arenas + tile)
    if arena >= 0:
        first_value = arena.to(tl.int64) * arena_values
        first_word = arena.to(tl.int64) * arena_words
        part = tl.program_id(1) // (RANKS // BLOCK_R)
        first = tl.program_id(1) % (RANKS // BLOCK_R) * BLOCK_R
        entry = words + first_word + (first_part + part) * ENTRY
        rank = tl.load(entry)
        if first < rank:
            ranks = first + tl.arange(0, BLOCK_R)
            rank_ok = ranks < rank
            rows = tl.load(tile_rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
            row_ok = rows >= 0
            x_rows = x + rows.to(tl.int64)[:, None] * num_inputs
            down = values + first_value + tl.load(entry + 1).to(tl.int64) * UNIT
            down_rows = down + ranks[None, :] * num_inputs
            begin = tl.program_id(2) * split_inputs
            end = tl.minimum(begin + split_inputs, num_inputs)
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for k in range(begin, end, BLOCK_K):
                inputs = k + tl.arange(0, BLOCK_K)
                if IS_WHOLE:
                    a = tl.load(x_rows + inputs[None, :], mask=row_ok[:, None], other=0.0)
                    b = tl.load(down_rows + inputs[:, None], mask=rank_ok[None, :], other=0.0)
                else:
                    input_ok = inputs < num_inputs
                    a_mask = row_ok[:, None] & input_ok[None, :]
                    a = tl.load(x_rows + inputs[None, :], mask=a_mask, other=0.0)
                    b_mask = input_ok[:, None] & rank_ok[None, :]
                    b = tl.load(down_rows + inputs[:, None], mask=b_mask, other=0.0)
                acc = tl.dot(a, b, acc, input_precision="ieee") if EXACT else tl.dot(a, b, acc)
            own = (tl.program_id(2) * num_rows + rows).to(tl.int64)[:, None] * (PARTS * RANKS)
            target = partials + own + part * RANKS + ranks[None, :]
            tl.store(target, acc, mask=row_ok[:, None] & rank_ok[None, :])


@triton.jit(do_not_specialize=["first_part", "num_rows"])
def expand_kernel(
    y,  # [rows, num_outputs]
    partials,  # as shrink_kernel left them
    values,
    words,
    floats,
    tile_arenas,
    tile_rows,
    blocks,  # [blocks, 4]: part, first output in it, first output in y, outputs of the part
    arena_values,
    arena_words,
    first_part,
    num_rows,
    num_outputs,
    SPLITS: tl.constexpr,
    IN_UNITS: tl.constexpr,  # all parts begin and end at multiples of UNIT
    PARTS: tl.constexpr,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    ENTRY: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    arena = tl.load(tile_arenas + tile)
    if arena >= 0:
        first_value = arena.to(tl.int64) * arena_values
        first_word = arena.to(tl.int64) * arena_words
        block = blocks + tl.program_id(1) * 4
        part = tl.load(block)
        entry = first_word + (first_part + part) * ENTRY
        rank = tl.load(words + entry) // UNIT * UNIT  # which it is; so the compiler knows
        if rank > 0:
            # A block begins at a multiple of its length.
            start, place = tl.load(block + 1) // BLOCK_N * BLOCK_N, tl.load(block + 2)
            size = tl.load(block + 3)
            if IN_UNITS:
                size, place = size // UNIT * UNIT, place // UNIT * UNIT
            outputs = tl.arange(0, BLOCK_N)
            output_ok = start + outputs < size
            rows = tl.load(tile_rows + tile * BLOCK_M + tl.arange(0, BLOCK_M))
            row_ok = rows >= 0
            up = values + first_value + tl.load(words + entry + 2).to(tl.int64) * UNIT
            up_rows = up + (start + outputs) * rank
            sums = partials + part * RANKS + rows.to(tl.int64)[:, None] * (PARTS * RANKS)
            split_values = num_rows.to(tl.int64) * (PARTS * RANKS)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for first in range(0, rank, BLOCK_R):
                ranks = first + tl.arange(0, BLOCK_R)
                rank_ok = ranks < rank
                b_mask = rank_ok[:, None] & output_ok[None, :]
                b = tl.load(up_rows[None, :] + ranks[:, None], mask=b_mask, other=0.0)
                u_mask = row_ok[:, None] & rank_ok[None, :]
                u = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                for split in tl.static_range(0, SPLITS):
                    places = sums + split * split_values + ranks[None, :]
                    u += tl.load(places, mask=u_mask, other=0.0)
                a = u.to(values.dtype.element_ty)
                acc = tl.dot(a, b, acc, input_precision="ieee") if EXACT else tl.dot(a, b, acc)
            scale = tl.load(floats + entry + 3)
            target = y + rows.to(tl.int64)[:, None] * num_outputs
            target += place + outputs[None, :]
            mask = row_ok[:, None] & output_ok[None, :]
            before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, (before + scale * acc).to(y.dtype.element_ty), mask=mask)


def add_adapters(y: Tensor, x: Tensor, site: DeviceSite, arenas: Arenas, step: DeviceStep) -> None:
    """y [T, outputs] += scale * (x [T, columns] · Aᵀ) · Bᵀ, each row by its own adapter."""
    assert step.adapter_tiles is not None and step.adapter_rows is not None
    num_rows, num_inputs = x.shape
    num_tiles = len(step.adapter_tiles)
    block_m = len(step.adapter_rows) // num_tiles
    tile = choose_tile(block_m, arenas.ranks)
    split = arenas.cut.split(num_inputs, num_rows)
    arena_values, arena_words = arenas.values.shape[1], arenas.words.shape[1]
    common = {
        "PARTS": site.num_parts, "RANKS": arenas.ranks, "UNIT": UNIT, "ENTRY": ENTRY_WORDS,
        "EXACT": x.dtype == torch.float32, "BLOCK_M": block_m,
    }  # fmt: skip
    programs = site.num_parts * (arenas.ranks // tile.block_r)
    shrink_kernel[(num_tiles, programs, split.num_parts)](
        arenas.partials, x, arenas.values, arenas.words, step.adapter_tiles, step.adapter_rows,
        arena_values, arena_words, site.first_part, num_rows, num_inputs, split.num_inputs,
        IS_WHOLE=num_inputs % tile.block_k == 0, BLOCK_R=tile.block_r, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **common,
    )  # fmt: skip
    expand_kernel[(num_tiles, len(site.blocks))](
        y, arenas.partials, arenas.values, arenas.words, arenas.floats,
        step.adapter_tiles, step.adapter_rows, site.blocks,
        arena_values, arena_words, site.first_part, num_rows, y.shape[1],
        SPLITS=split.num_parts, IN_UNITS=all(size % UNIT == 0 for size in site.sizes),
        BLOCK_R=RANKS if x.dtype == torch.float32 else tile.block_r,  # whose sums are registers
        BLOCK_N=BLOCK_OUTPUTS, num_warps=4, num_stages=2, **common,
    )  # fmt: skip
