"""Attention of single tokens: each sequence's walk over its keys and values in parts of about equal
length, however long the sequences are.

A program takes one part and one kv head, for the GROUP query heads that share it. The program that
is the last of its sequence to arrive adds what the others left, in the order of the parts, so the
bits do not depend on who was last. The parts are cut on the host (`device_step.cut_walks`), as many
as keep all processors busy; a graph has room for that many and those without work end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.attention import (
    LOG2_E,
    add_sinks,
    first_seen,
    look_along,
)

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import LayerKV
    from octavo_engine.ops import AttentionSpec

JOINED_VALUES = 8192  # of parts' averages that a program adds at once


class WalkTile(NamedTuple):
    """How many tokens a program looks at in one go, and the launch that suits it."""

    block_n: int
    num_warps: int
    num_stages: int


def choose_tile(*, head_dim: int, itemsize: int, has_scales: bool = False) -> WalkTile:
    """What was fastest on an H100. The compiler shares stages between the numbers of pages and what
    lies in these, so five hold two blocks of the latter."""
    if itemsize == 4:  # no matrix units for exact float32: for checking, not for speed
        return WalkTile(16, 4, 1)
    if head_dim > 128:
        return WalkTile(32, 4, 2)
    if has_scales:  # what is widened from eight bits lies in registers
        return WalkTile(64, 4, 5)
    return WalkTile(64, 2, 5)


@triton.jit
def walk_kernel(
    out,  # [S, num_heads * HEAD_DIM]
    parts,  # [tiles, kv heads, GROUP, HEAD_DIM] f32: averages that are not divided yet
    part_maxima,  # [tiles, kv heads, GROUP] f32
    part_sums,
    arrivals,  # [S, kv heads] i32: zeros, before and after
    q,  # [S, num_heads * HEAD_DIM]
    k_cache,  # [blocks, PAGE, kv heads, HEAD_DIM]
    v_cache,
    sinks,  # [num_heads] f32, if HAS_SINKS
    alibi,  # [num_heads] f32, if HAS_ALIBI
    tile_seqs,  # -1: no part
    tile_starts,
    tile_ends,
    seq_tiles,  # [S + 1]: the first part of each
    seq_lens,
    table_starts,
    tables,
    score_scale,  # scale, times log2(e) unless there is a soft cap
    soft_cap,
    window,
    k_scales,  # [blocks, kv heads, PAGE] bf16, if HAS_SCALES
    v_scales,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,  # GROUP, up to a power of two
    ROWS: tl.constexpr,  # what the matrix units take at least
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # that are added at once
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # keys and values are in e4m3
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    sequence = tl.load(tile_seqs + tile)
    start, end = tl.load(tile_starts + tile), tl.load(tile_ends + tile)
    if sequence >= 0:
        seq_len = tl.load(seq_lens + sequence)
        pages = tables + tl.load(table_starts + sequence)
        first_tile = tl.load(seq_tiles + sequence)
        num_parts = tl.load(seq_tiles + sequence + 1) - first_tile
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        dim_ok = dims < HEAD_DIM
        num_heads = num_kv_heads * GROUP
        heads, member_ok = kv_head * GROUP + rows, rows < GROUP
        q_mask = member_ok[:, None] & dim_ok[None, :]
        q_places = (sequence.to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        q_rows = tl.load(q + q_places, mask=q_mask, other=0.0)
        positions = tl.zeros([ROWS], tl.int32) + (seq_len - 1)

        low = start
        lows, slopes = positions, positions
        if HAS_WINDOW:
            lows = first_seen(positions, window, IS_CHUNKED)
            low = tl.maximum(start, first_seen(seq_len - 1, window, IS_CHUNKED))
            start = low // BLOCK_N * BLOCK_N
        if HAS_ALIBI:
            slopes = tl.load(alibi + heads, mask=member_ok, other=0.0) * 1.4426950408889634
        whole = start
        if not HAS_WINDOW:
            whole = start + (end - start) // BLOCK_N * BLOCK_N
        maxima = tl.full([ROWS], -float("inf"), tl.float32)
        sums = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        maxima, sums, acc = look_along(
            maxima, sums, acc, q_rows, k_cache, v_cache, pages, start, whole, end, low, end,
            positions, lows, slopes, kv_head, num_kv_heads, score_scale, soft_cap,
            k_scales, v_scales,
            HEAD_DIM, DIM, PAGE, BLOCK_N, HAS_WINDOW, HAS_CAP, HAS_ALIBI, EXACT, HAS_SCALES,
        )  # fmt: skip

        if num_parts == 1:
            if HAS_SINKS:
                sums = add_sinks(sums, maxima, sinks, heads, member_ok)
            result = acc / tl.where(sums > 0, sums, 1.0)[:, None]
            tl.store(out + q_places, result.to(out.dtype.element_ty), mask=q_mask)
        else:
            at = (tile * num_kv_heads + kv_head) * GROUP + rows
            tl.store(part_maxima + at, maxima, mask=member_ok)
            tl.store(part_sums + at, sums, mask=member_ok)
            target = parts + at.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(target, acc, mask=q_mask)
            arrival = arrivals + sequence * num_kv_heads + kv_head
            tl.debug_barrier()  # all threads' parts are written before one of them says so
            if tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrival, 0)
                join_parts(
                    out, parts, part_maxima, part_sums, sinks, 0, sequence, kv_head, num_kv_heads,
                    first_tile, num_parts, GROUP, MEMBERS, 1, HEAD_DIM, DIM, PARTS, HAS_SINKS,
                )  # fmt: skip


@triton.jit
def join_parts(
    out,
    parts,
    part_maxima,
    part_sums,
    sinks,
    token,  # of its sequence's
    row,  # of the step
    kv_head,
    num_kv_heads,
    first_tile,
    num_parts,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,  # that a sequence has room for
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """What the parts of a sequence come to for a token, each weighed by how much of the softmax it
    has seen. They are read past the first cache, which other processors do not write to."""
    members, dims, index = tl.arange(0, MEMBERS), tl.arange(0, DIM), tl.arange(0, PARTS)
    member_ok, dim_ok = members < GROUP, dims < HEAD_DIM
    maximum = tl.full([MEMBERS], -float("inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, DIM], tl.float32)
    for first in range(0, num_parts, PARTS):
        tiles = first_tile + first + index
        at = ((tiles[:, None] * num_kv_heads + kv_head) * TOKENS + token) * GROUP + members[None, :]
        mask = (first + index < num_parts)[:, None] & member_ok[None, :]
        part_max = tl.load(part_maxima + at, mask=mask, other=-float("inf"), cache_modifier=".cg")
        part_sum = tl.load(part_sums + at, mask=mask, other=0.0, cache_modifier=".cg")
        part = tl.load(
            parts + at.to(tl.int64)[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & dim_ok[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(maximum, tl.max(part_max, 0))
        pivot = tl.where(new_max == -float("inf"), 0.0, new_max)
        fade, weight = tl.exp2(maximum - pivot), tl.exp2(part_max - pivot[None, :])
        acc = acc * fade[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * fade + tl.sum(part_sum * weight, 0)
        maximum = new_max
    heads = kv_head * GROUP + members
    if HAS_SINKS:
        total = add_sinks(total, maximum, sinks, heads, member_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    rows = row.to(tl.int64) * num_kv_heads * GROUP + heads
    tl.store(
        out + rows[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty),
        mask=member_ok[:, None] & dim_ok[None, :],
    )  # fmt: skip


def parts_bytes(*, num_parts: int, num_heads: int, head_dim: int) -> int:
    """What the parts of a step take, with their maxima and sums."""
    return num_parts * num_heads * (head_dim + 2) * 4


def attend(
    q: Tensor,
    kv: LayerKV,
    step: DeviceStep,
    spec: AttentionSpec,
    *,
    tile: WalkTile,
    alibi: Tensor | None = None,
) -> Tensor:
    """q [S, num_heads * head_dim], a token of each sequence, over the sequence's pages. `alibi`:
    the spec's."""
    k_cache, v_cache, scales = kv
    out = torch.empty_like(q)
    num_tiles = len(step.tile_seqs)
    if num_tiles == 0:
        return out
    group = spec.num_heads // spec.num_kv_heads
    members, dim = triton.next_power_of_2(group), triton.next_power_of_2(spec.head_dim)
    num_parts = num_tiles * spec.num_heads
    parts = q.new_empty((num_parts, spec.head_dim), dtype=torch.float32)
    maxima, sums = q.new_empty((2, num_parts), dtype=torch.float32).unbind()
    walk_kernel[(num_tiles, spec.num_kv_heads)](
        out, parts, maxima, sums, step.arrivals, q, k_cache, v_cache,
        q if spec.sinks is None else spec.sinks, q if alibi is None else alibi,
        step.tile_seqs, step.tile_starts, step.tile_ends, step.seq_tiles, step.seq_lens,
        step.table_starts, step.tables,
        spec.scale if spec.soft_cap is not None else spec.scale * LOG2_E,
        spec.soft_cap or 0.0, spec.window or 0, *(scales or (q, q)),
        GROUP=group, MEMBERS=members, ROWS=max(16, members), HEAD_DIM=spec.head_dim, DIM=dim,
        PAGE=k_cache.shape[1], BLOCK_N=tile.block_n,
        PARTS=max(2, min(64, JOINED_VALUES // (members * dim))),
        HAS_WINDOW=spec.window is not None, IS_CHUNKED=spec.is_chunked,
        HAS_CAP=spec.soft_cap is not None, HAS_SINKS=spec.sinks is not None,
        HAS_ALIBI=alibi is not None,
        EXACT=q.dtype == torch.float32, HAS_SCALES=scales is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out
