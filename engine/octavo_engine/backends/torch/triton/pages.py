"""Whole KV blocks, collected from all layers into one piece of memory each, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.operands import PageMoves

WORDS = 2048  # that a program moves at once


@triton.jit(do_not_specialize=["num_blocks"])
def move_pages_kernel(
    staging,  # int32 [slots, page_words]
    region,  # int32 [rows, num_blocks, ROW_WORDS]
    block_ids,  # -1: nothing is moved
    slots,
    num_blocks,
    page_words,
    first_word,  # of the region within a page
    ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SAVE: tl.constexpr,
):
    """What one row of a region has of one block."""
    index, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + index).to(tl.int64)
    slot = tl.load(slots + index).to(tl.int64)
    inside = region + (row * num_blocks + block) * ROW_WORDS
    outside = staging + slot * page_words + first_word + row * ROW_WORDS
    if block >= 0:
        for start in range(0, ROW_WORDS, BLOCK):
            words = start + tl.arange(0, BLOCK)
            mask = words < ROW_WORDS
            if IS_SAVE:
                tl.store(outside + words, tl.load(inside + words, mask=mask), mask=mask)
            else:
                tl.store(inside + words, tl.load(outside + words, mask=mask), mask=mask)


def move_pages(staging: Tensor, region: Tensor, moves: PageMoves, *, is_save: bool) -> None:
    """Blocks of one region into their slots, or back; int32 all."""
    block_ids, slots, first = moves
    num_rows, num_blocks, row_words = region.shape
    move_pages_kernel[(len(block_ids), num_rows)](
        staging, region, block_ids, slots, num_blocks, staging.shape[1], first,
        ROW_WORDS=row_words, BLOCK=min(WORDS, triton.next_power_of_2(row_words)), IS_SAVE=is_save,
        num_warps=4,
    )  # fmt: skip
