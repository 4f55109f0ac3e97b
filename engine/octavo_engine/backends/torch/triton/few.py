"""Attention of a few tokens of each sequence, as steps have that verify drafts: the walk of
`decode.py` over parts of contexts. The rows of a program's matrix are up to TOKENS tokens of a
sequence times GROUP query heads.

All tokens of a sequence but its last see less than the whole context, so the end of the walk is
masked, and a part may hold nothing that the first of them see: it then weighs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.attention import LOG2_E, first_seen, look_along
from octavo_engine.backends.torch.triton.decode import JOINED_VALUES, WalkTile, join_parts

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import LayerKV
    from octavo_engine.ops import AttentionSpec

MOST_ROWS = 128  # tokens times query heads that a program holds


def choose_tile(*, rows: int, head_dim: int, itemsize: int) -> WalkTile:
    """As `decode.choose_tile`, with warps enough for the sums of more rows."""
    if itemsize == 4:  # no matrix units for exact float32: for checking, not for speed
        return WalkTile(16, 4 if rows <= 16 else 8, 1)
    num_warps = 4 if rows <= 64 else 8
    if head_dim > 128:
        return WalkTile(32, num_warps, 2)
    return WalkTile(64, num_warps, 5)


def rows_of(group: int, width: int) -> int:
    """Of a program's matrix, for up to `width` tokens."""
    power: int = triton.next_power_of_2(group * width)
    return max(16, power)


def parts_bytes(*, num_parts: int, width: int, num_heads: int, head_dim: int) -> int:
    """What the parts of a step take, with their maxima and sums."""
    return num_parts * width * num_heads * (head_dim + 2) * 4


@triton.jit
def few_kernel(
    out,  # [T, num_heads * HEAD_DIM]
    parts,  # [tiles, kv heads, TOKENS, GROUP, HEAD_DIM] f32: averages that are not divided yet
    part_maxima,  # [tiles, kv heads, TOKENS, GROUP] f32
    part_sums,
    arrivals,  # [S, kv heads] i32: zeros, before and after
    q,  # [T, num_heads * HEAD_DIM]
    k_cache,  # [blocks, PAGE, kv heads, HEAD_DIM]
    v_cache,
    tile_seqs,  # -1: no part
    tile_starts,
    tile_ends,
    seq_tiles,  # [S + 1]: the first part of each
    seq_starts,
    seq_lens,
    table_starts,
    tables,
    score_scale,  # scale, times log2(e) unless there is a soft cap
    soft_cap,
    window,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,  # GROUP, up to a power of two
    TOKENS: tl.constexpr,  # that a sequence has at most
    ROWS: tl.constexpr,  # TOKENS * GROUP, up to a power of two
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # that are added at once
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    sequence = tl.load(tile_seqs + tile)
    start, end = tl.load(tile_starts + tile), tl.load(tile_ends + tile)
    if sequence >= 0:
        begin = tl.load(seq_starts + sequence)
        count = tl.load(seq_starts + sequence + 1) - begin
        before = tl.load(seq_lens + sequence) - count  # tokens that all rows see
        pages = tables + tl.load(table_starts + sequence)
        first_tile = tl.load(seq_tiles + sequence)
        num_parts = tl.load(seq_tiles + sequence + 1) - first_tile
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        tokens, members = rows // GROUP, rows % GROUP
        row_ok, dim_ok = tokens < count, dims < HEAD_DIM
        num_heads = num_kv_heads * GROUP
        heads = (begin + tokens).to(tl.int64) * num_heads + kv_head * GROUP + members
        q_mask = row_ok[:, None] & dim_ok[None, :]
        q_places = heads[:, None] * HEAD_DIM + dims[None, :]
        q_rows = tl.load(q + q_places, mask=q_mask, other=0.0)
        positions = before + tokens

        low, lows = start, positions
        if HAS_WINDOW:
            lows = first_seen(positions, window, False)
            low = tl.maximum(start, before + 1 - window)
            start = low // BLOCK_N * BLOCK_N
        whole = start
        if not HAS_WINDOW:
            seen = tl.maximum(tl.minimum(end, before + 1) - start, 0)
            whole = start + seen // BLOCK_N * BLOCK_N
        maxima = tl.full([ROWS], -float("inf"), tl.float32)
        sums = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        maxima, sums, acc = look_along(
            maxima, sums, acc, q_rows, k_cache, v_cache, pages, start, whole, end, low, end,
            positions, lows, positions, kv_head, num_kv_heads, score_scale, soft_cap, q, q,
            HEAD_DIM, DIM, PAGE, BLOCK_N, HAS_WINDOW, HAS_CAP, False, EXACT, False,
        )  # fmt: skip

        if num_parts == 1:
            result = acc / tl.where(sums > 0, sums, 1.0)[:, None]
            tl.store(out + q_places, result.to(out.dtype.element_ty), mask=q_mask)
        else:
            at = (tile * num_kv_heads + kv_head) * (TOKENS * GROUP) + rows
            tl.store(part_maxima + at, maxima, mask=row_ok)
            tl.store(part_sums + at, sums, mask=row_ok)
            target = parts + at.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, acc, mask=q_mask)
            arrival = arrivals + sequence * num_kv_heads + kv_head
            tl.debug_barrier()  # all threads' parts are written before one of them says so
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrival, 0)
                for token in range(count):
                    join_parts(
                        out, parts, part_maxima, part_sums, q, token, begin + token, kv_head,
                        num_kv_heads, first_tile, num_parts,
                        GROUP, MEMBERS, TOKENS, HEAD_DIM, DIM, PARTS, False,
                    )  # fmt: skip


def attend(
    q: Tensor,
    kv: LayerKV,
    step: DeviceStep,
    spec: AttentionSpec,
    *,
    tile: WalkTile | None = None,
) -> Tensor:
    """q [T, num_heads * head_dim], up to `step.width` tokens of each sequence, over its pages."""
    k_cache, v_cache, _ = kv
    out = torch.empty_like(q)
    num_tiles = len(step.tile_seqs)
    if num_tiles == 0:
        return out
    group = spec.num_heads // spec.num_kv_heads
    rows = rows_of(group, step.width)
    tile = tile or choose_tile(rows=rows, head_dim=spec.head_dim, itemsize=q.dtype.itemsize)
    members, dim = triton.next_power_of_2(group), triton.next_power_of_2(spec.head_dim)
    num_parts = num_tiles * step.width * spec.num_heads
    parts = q.new_empty((num_parts, spec.head_dim), dtype=torch.float32)
    maxima = q.new_empty(num_parts, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    few_kernel[(num_tiles, spec.num_kv_heads)](
        out, parts, maxima, sums, step.arrivals, q, k_cache, v_cache,
        step.tile_seqs, step.tile_starts, step.tile_ends, step.seq_tiles, step.seq_starts,
        step.seq_lens, step.table_starts, step.tables,
        spec.scale if spec.soft_cap is not None else spec.scale * LOG2_E,
        spec.soft_cap or 0.0, spec.window or 0,
        GROUP=group, MEMBERS=members, TOKENS=step.width, ROWS=rows,
        HEAD_DIM=spec.head_dim, DIM=dim, PAGE=k_cache.shape[1], BLOCK_N=tile.block_n,
        PARTS=max(2, min(64, JOINED_VALUES // (members * dim))),
        HAS_WINDOW=spec.window is not None, HAS_CAP=spec.soft_cap is not None,
        EXACT=q.dtype == torch.float32,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
