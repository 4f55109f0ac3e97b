"""Attention over latent vectors, one a token that all heads share, without ever forming a head's
keys or values: queries are brought into latent space, and what they sum up is brought back.

  store   the latent vector normed, its key and the queries turned; the vector goes to the cache
  attend  rows of tokens times heads over a sequence's vectors, in steps that hold prompts
  walk    the same for single tokens, whose contexts are cut into parts (`device_step.cut_walks`)
  join    what the parts of a context come to

A vector is read once for up to GROUP_ROWS heads, as keys and as values. The parts of a context hold
as much as its vectors do, so that all processors join them, in a launch of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton import attention
from octavo_engine.backends.torch.triton.attention import LOG2_E, first_seen

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.ops import LatentAttentionSpec

GROUP_ROWS = 32  # query heads that a program takes, at most
TURNED_HEADS = 8  # that a program turns
JOINED_PARTS = 8  # that a program adds at once
HEAD_M, HEAD_N, HEAD_K = 64, 64, 32  # tiles of products of heads


class LatentTile(NamedTuple):
    """How a program's work is cut, and the launch that suits it."""

    group: int  # heads, which divide all there are
    block_m: int  # rows in a step that holds prompts: tokens times heads
    block_n: int  # tokens looked at in one go
    num_warps: int
    num_stages: int

    @property
    def tokens_per_tile(self) -> int:
        return self.block_m // self.group

    @property
    def walk_rows(self) -> int:
        """Of a single token: no fewer than the matrix units take."""
        return max(16, int(triton.next_power_of_2(self.group)))


def choose_tile(*, num_heads: int, itemsize: int) -> LatentTile:
    """What compiles for an H100 without spilling: of a rank of 512 the sums of 32 rows take half of
    a program's registers, and two blocks of vectors half of a processor's shared memory."""
    most = GROUP_ROWS if itemsize == 2 else 16
    group = max(n for n in range(1, most + 1) if num_heads % n == 0)
    if itemsize == 4:  # no matrix units for exact float32: for checking, not for speed
        return LatentTile(group, max(16, triton.next_power_of_2(group)), 16, 4, 1)
    return LatentTile(group, GROUP_ROWS, 64, 8, 2)


@triton.jit
def store_kernel(
    turned,  # [T, heads, ROPE]
    cache,  # [blocks, PAGE, RANK + ROPE]
    q,  # [T, heads, NOPE + ROPE]
    kv,  # [T, RANK + ROPE]
    cos_sin,  # [positions, ROPE]: cosines, then sines
    positions,
    slots,  # -1: a row of padding, nothing is written
    kv_norm,
    eps,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,  # RANK, up to a power of two
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,
    NEIGHBOURS: tl.constexpr,  # pairs that turn lie side by side
    HEADS: tl.constexpr,
):
    """One token: its vector, or some of its heads' queries."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = ROPE // 2
    dims = tl.arange(0, ROPES)
    dim_ok = dims < ROPE
    pair = tl.where(dims < HALF, dims, dims - HALF)
    if NEIGHBOURS:
        own = 2 * pair + (dims >= HALF).to(tl.int32)
        other = 2 * pair + (dims < HALF).to(tl.int32)
    else:
        own = dims
        other = tl.where(dims < HALF, dims + HALF, dims - HALF)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * ROPE
    cos = tl.load(angles + pair, mask=dim_ok, other=1.0)
    sin = tl.load(angles + HALF + pair, mask=dim_ok, other=0.0)
    sin = tl.where(dims < HALF, -sin, sin)
    if part > 0:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        mask = (heads < NUM_HEADS)[:, None] & dim_ok[None, :]
        source = q + (token * NUM_HEADS + heads)[:, None] * (NOPE + ROPE) + NOPE
        x = tl.load(source + own[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
        x = x * cos[None, :] + y * sin[None, :]
        target = turned + (token * NUM_HEADS + heads)[:, None] * ROPE + dims[None, :]
        tl.store(target, x.to(turned.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            ranks = tl.arange(0, RANKS)
            source, target = kv + token * (RANK + ROPE), cache + slot * (RANK + ROPE)
            latent = tl.load(source + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
            latent = latent * (1 / tl.sqrt_rn(tl.sum(latent * latent, 0) / RANK + eps))
            latent = latent * tl.load(kv_norm + ranks, mask=ranks < RANK, other=0.0)
            tl.store(target + ranks, latent.to(cache.dtype.element_ty), mask=ranks < RANK)
            key = tl.load(source + RANK + own, mask=dim_ok, other=0.0).to(tl.float32)
            beside = tl.load(source + RANK + other, mask=dim_ok, other=0.0).to(tl.float32)
            key = key * cos + beside * sin
            tl.store(target + RANK + dims, key.to(cache.dtype.element_ty), mask=dim_ok)


@triton.jit
def look_at(
    maxima,
    sums,
    acc,
    q_latent,  # [rows, RANKS]
    q_rope,  # [rows, ROPES]
    cache,
    pages,  # of the sequence
    n,  # the first of BLOCK_N tokens
    low,
    high,
    positions,  # [rows]: the last token that each sees
    lows,  # [rows]: the first one, if HAS_WINDOW
    score_scale,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: all rows see all of the tokens
    HAS_WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The running maximum, sum and average of vectors, after BLOCK_N more tokens."""
    columns = n + tl.arange(0, BLOCK_N)
    ranks, ropes = tl.arange(0, RANKS), tl.arange(0, ROPES)
    # Memory outside of [low, high) may hold anything, NaN too, and must not be read.
    column_ok = (columns >= low) & (columns < high)
    if IS_MASKED:
        blocks = tl.load(pages + columns // PAGE, mask=column_ok, other=0)
    else:
        blocks = tl.load(pages + columns // PAGE)
    places = (blocks.to(tl.int64) * PAGE + columns % PAGE) * (RANK + ROPE)
    latent_rows = cache + places[:, None] + ranks[None, :]
    key_rows = cache + places[:, None] + (RANK + ropes[None, :])
    if IS_MASKED:
        mask = column_ok[:, None] & (ranks < RANK)[None, :]
        latents = tl.load(latent_rows, mask=mask, other=0.0)
        mask = column_ok[:, None] & (ropes < ROPE)[None, :]
        keys = tl.load(key_rows, mask=mask, other=0.0)
    elif RANK == RANKS and ROPE == ROPES:
        latents, keys = tl.load(latent_rows), tl.load(key_rows)
    else:
        latents = tl.load(latent_rows, mask=ranks[None, :] < RANK, other=0.0)
        keys = tl.load(key_rows, mask=ropes[None, :] < ROPE, other=0.0)
    if EXACT:
        scores = tl.dot(q_rope, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee")
    else:
        scores = tl.dot(q_rope, tl.trans(keys))
        scores = tl.dot(q_latent, tl.trans(latents), scores)
    scores = scores * score_scale
    if IS_MASKED:
        seen = (columns[None, :] <= positions[:, None]) & column_ok[None, :]
        if HAS_WINDOW:
            seen = seen & (columns[None, :] >= lows[:, None])
        scores = tl.where(seen, scores, -float("inf"))
    new_maxima = tl.maximum(maxima, tl.max(scores, 1))
    pivots = new_maxima
    if IS_MASKED:  # a row that has seen nothing yet has no maximum to subtract
        pivots = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
    weights = tl.exp2(scores - pivots[:, None])
    fade = tl.exp2(maxima - pivots)
    acc = acc * fade[:, None]
    if EXACT:
        acc = tl.dot(weights, latents, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(latents.dtype), latents, acc)
    return new_maxima, sums * fade + tl.sum(weights, 1), acc


@triton.jit
def look_along(
    q_latent,
    q_rope,
    cache,
    pages,
    start,
    whole,  # up to here all rows see all tokens
    stop,
    low,
    high,
    positions,
    lows,
    score_scale,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The maximum, sum and average of vectors over the tokens [start, stop)."""
    maxima = tl.full([ROWS], -float("inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANKS], tl.float32)
    for n in range(start, whole, BLOCK_N):
        maxima, sums, acc = look_at(
            maxima, sums, acc, q_latent, q_rope, cache, pages, n, low, high, positions, lows,
            score_scale, RANK, RANKS, ROPE, ROPES, PAGE, BLOCK_N, False, False, EXACT,
        )  # fmt: skip
    for n in range(whole, stop, BLOCK_N):
        maxima, sums, acc = look_at(
            maxima, sums, acc, q_latent, q_rope, cache, pages, n, low, high, positions, lows,
            score_scale, RANK, RANKS, ROPE, ROPES, PAGE, BLOCK_N, True, HAS_WINDOW, EXACT,
        )  # fmt: skip
    return maxima, sums, acc


@triton.jit(do_not_specialize=["first_tile", "part_rows", "split_tokens"])
def attend_kernel(
    out,  # [T, heads, RANK]
    parts,  # [tiles, head groups, splits, part_rows, RANK] f32, if SPLIT
    part_maxima,  # [tiles, head groups, splits, part_rows] f32
    part_sums,
    absorbed,  # [T, heads, RANK]
    turned,  # [T, heads, ROPE]
    cache,  # [blocks, PAGE, RANK + ROPE]
    tile_seqs,
    tile_starts,
    seq_starts,
    seq_lens,
    table_starts,
    tables,
    first_tile,  # of this launch
    part_rows,
    score_scale,  # times log2(e)
    window,
    split_tokens,  # a part's tokens, a multiple of BLOCK_N; 0: equal parts
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    # The last tiles of a prompt look at the most tokens, so they begin first.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    head_group, split = tl.program_id(1), tl.program_id(2)
    tile = first_tile + place
    num_groups, num_splits = tl.num_programs(1), tl.num_programs(2)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    sequence = tl.load(tile_seqs + tile)
    first = tl.load(tile_starts + tile)
    begin = tl.load(seq_starts + sequence)
    count = tl.load(seq_starts + sequence + 1) - begin
    seq_len = tl.load(seq_lens + sequence)
    pages = tables + tl.load(table_starts + sequence)
    context = seq_len - count  # tokens whose vectors were there before this step

    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    row_ok = (rows < BLOCK_Q * GROUP) & (tokens < count)
    positions = context + tokens
    ranks, ropes = tl.arange(0, RANKS), tl.arange(0, ROPES)
    heads = head_group * GROUP + rows % GROUP
    heads = (begin + tokens).to(tl.int64) * (num_groups * GROUP) + heads
    mask = row_ok[:, None] & (ranks < RANK)[None, :]
    q_latent = tl.load(absorbed + heads[:, None] * RANK + ranks[None, :], mask=mask, other=0.0)
    rope_mask = row_ok[:, None] & (ropes < ROPE)[None, :]
    q_rope = tl.load(turned + heads[:, None] * ROPE + ropes[None, :], mask=rope_mask, other=0.0)

    # [low, high) is what some row of the tile sees.
    high = tl.minimum(context + first + BLOCK_Q, seq_len)
    low = 0
    lows = positions
    if HAS_WINDOW:
        low = first_seen(context + first, window, False)
        lows = first_seen(positions, window, False)
    start = low // BLOCK_N * BLOCK_N
    stop = high
    if SPLIT:
        if split_tokens == 0:
            share = tl.cdiv(tl.cdiv(high - start, BLOCK_N), num_splits) * BLOCK_N
            start = start + split * share
            stop = tl.minimum(start + share, high)
        else:  # cuts at fixed places, the same for a token in any step
            start = tl.maximum(start, split * split_tokens)
            stop = tl.minimum((split + 1) * split_tokens, high)
    whole = start
    if not (HAS_WINDOW or ALWAYS_MASKED):
        whole += tl.maximum(tl.minimum(stop, context + first + 1) - start, 0) // BLOCK_N * BLOCK_N
    maxima, sums, acc = look_along(
        q_latent, q_rope, cache, pages, start, whole, stop, low, high, positions, lows,
        score_scale, BLOCK_M, RANK, RANKS, ROPE, ROPES, PAGE, BLOCK_N, HAS_WINDOW, EXACT,
    )  # fmt: skip

    if SPLIT:
        is_used = rows < part_rows
        at = ((place * num_groups + head_group) * num_splits + split) * part_rows + rows
        tl.store(part_maxima + at, maxima, mask=is_used)
        tl.store(part_sums + at, sums, mask=is_used)
        target = parts + at.to(tl.int64)[:, None] * RANK + ranks[None, :]
        tl.store(target, acc, mask=is_used[:, None] & (ranks < RANK)[None, :])
    else:
        result = acc / tl.where(sums > 0, sums, 1.0)[:, None]
        target = out + heads[:, None] * RANK + ranks[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def walk_kernel(
    out,  # [S, heads, RANK]
    parts,  # [tiles, heads, RANK] f32: averages that are not divided yet
    part_maxima,  # [tiles, heads] f32
    part_sums,
    absorbed,  # [S, heads, RANK]
    turned,  # [S, heads, ROPE]
    cache,  # [blocks, PAGE, RANK + ROPE]
    tile_seqs,  # -1: no part
    tile_starts,
    tile_ends,
    seq_tiles,  # [S + 1]: the first part of each
    seq_lens,
    table_starts,
    tables,
    score_scale,  # times log2(e)
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One part of a sequence's context, for GROUP heads of its token."""
    tile, num_heads = tl.program_id(0), tl.num_programs(1) * GROUP
    sequence = tl.load(tile_seqs + tile)
    start, end = tl.load(tile_starts + tile), tl.load(tile_ends + tile)
    if sequence >= 0:
        seq_len = tl.load(seq_lens + sequence)
        pages = tables + tl.load(table_starts + sequence)
        num_parts = tl.load(seq_tiles + sequence + 1) - tl.load(seq_tiles + sequence)
        rows, ranks, ropes = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, ROPES)
        row_ok, heads = rows < GROUP, tl.program_id(1) * GROUP + rows
        mask = row_ok[:, None] & (ranks < RANK)[None, :]
        places = (sequence.to(tl.int64) * num_heads + heads)[:, None]
        q_latent = tl.load(absorbed + places * RANK + ranks[None, :], mask=mask, other=0.0)
        rope_mask = row_ok[:, None] & (ropes < ROPE)[None, :]
        q_rope = tl.load(turned + places * ROPE + ropes[None, :], mask=rope_mask, other=0.0)
        positions = tl.zeros([ROWS], tl.int32) + (seq_len - 1)
        low = start
        lows = positions
        whole = start + (end - start) // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            lows = first_seen(positions, window, False)
            low = tl.maximum(start, first_seen(seq_len - 1, window, False))
            start = low // BLOCK_N * BLOCK_N
            whole = start
        maxima, sums, acc = look_along(
            q_latent, q_rope, cache, pages, start, whole, end, low, end, positions, lows,
            score_scale, ROWS, RANK, RANKS, ROPE, ROPES, PAGE, BLOCK_N, HAS_WINDOW, EXACT,
        )  # fmt: skip
        if num_parts == 1:
            result = acc / tl.where(sums > 0, sums, 1.0)[:, None]
            target = out + places * RANK + ranks[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=mask)
        else:
            at = tile * num_heads + heads
            tl.store(part_maxima + at, maxima, mask=row_ok)
            tl.store(part_sums + at, sums, mask=row_ok)
            tl.store(parts + at.to(tl.int64)[:, None] * RANK + ranks[None, :], acc, mask=mask)


@triton.jit
def join_kernel(
    out,
    parts,
    part_maxima,
    part_sums,
    seq_tiles,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One head of a sequence: its parts in their order, each weighed by how much of the softmax it
    has seen."""
    sequence, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first_tile = tl.load(seq_tiles + sequence)
    num_parts = tl.load(seq_tiles + sequence + 1) - first_tile
    if num_parts > 1:
        ranks, index = tl.arange(0, RANKS), tl.arange(0, PARTS)
        rank_ok = ranks < RANK
        maximum = tl.full([1], -float("inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([RANKS], tl.float32)
        for first in range(0, num_parts, PARTS):
            is_there = first + index < num_parts
            at = (first_tile + first + index) * num_heads + head
            part_max = tl.load(part_maxima + at, mask=is_there, other=-float("inf"))
            part_sum = tl.load(part_sums + at, mask=is_there, other=0.0)
            part = tl.load(
                parts + at.to(tl.int64)[:, None] * RANK + ranks[None, :],
                mask=is_there[:, None] & rank_ok[None, :], other=0.0,
            )  # fmt: skip
            new_max = tl.maximum(maximum, tl.max(part_max, 0))
            pivot = tl.where(new_max == -float("inf"), 0.0, new_max)
            fade, weight = tl.exp2(maximum - pivot), tl.exp2(part_max - pivot)
            acc = acc * fade + tl.sum(part * weight[:, None], 0)
            total = total * fade + tl.sum(part_sum * weight, 0)
            maximum = new_max
        acc = acc / tl.where(total > 0, total, 1.0)
        target = out + (sequence.to(tl.int64) * num_heads + head) * RANK + ranks
        tl.store(target, acc.to(out.dtype.element_ty), mask=rank_ok)


@triton.jit(do_not_specialize=["num_rows"])
def heads_kernel(
    out,  # [T, heads, N]
    x,  # [T, heads, K], a row and a head each so far apart
    weight,  # [heads, N, K]
    num_rows,
    row_stride,
    head_stride,
    num_outputs,
    num_inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Each head's own product, in an order of sums that does not depend on how many rows there
    are."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, num_heads = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    row_ok, output_ok = rows < num_rows, outputs < num_outputs
    x_rows = x + rows.to(tl.int64)[:, None] * row_stride + head * head_stride
    weight_rows = weight + (head * num_outputs + outputs)[None, :] * num_inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, num_inputs, BLOCK_K):
        inputs = k + tl.arange(0, BLOCK_K)
        input_ok = inputs < num_inputs
        a_mask = row_ok[:, None] & input_ok[None, :]
        a = tl.load(x_rows + inputs[None, :], mask=a_mask, other=0.0)
        b_mask = input_ok[:, None] & output_ok[None, :]
        b = tl.load(weight_rows + inputs[:, None], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee") if EXACT else tl.dot(a, b, acc)
    target = out + (rows.to(tl.int64) * num_heads + head)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & output_ok[None, :])


def per_head(x: Tensor, weight: Tensor, *, batch_invariant: bool) -> Tensor:
    """x [T, heads, K] · each head's weightᵀ [heads, N, K]: [T, heads, N]."""
    num_rows, (num_heads, num_outputs, num_inputs) = len(x), weight.shape
    out = x.new_empty((num_rows, num_heads, num_outputs))
    if not batch_invariant:
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out
    heads_kernel[(triton.cdiv(num_rows, HEAD_M), triton.cdiv(num_outputs, HEAD_N), num_heads)](
        out, x, weight, num_rows, x.stride(0), x.stride(1), num_outputs, num_inputs,
        BLOCK_M=HEAD_M, BLOCK_N=HEAD_N, BLOCK_K=HEAD_K, EXACT=x.dtype == torch.float32,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def store(
    q: Tensor,
    kv: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    step: DeviceStep,
    spec: LatentAttentionSpec,
) -> Tensor:
    """The columns of q that turn, turned: [T, heads, rope_dim]. The vectors are in the cache
    afterwards."""
    turned = q.new_empty((len(q), spec.num_heads, spec.rope_dim))
    store_kernel[(len(q), 1 + triton.cdiv(spec.num_heads, TURNED_HEADS))](
        turned, cache, q, kv, cos_sin, step.positions, step.slots, spec.kv_norm, spec.norm_eps,
        NUM_HEADS=spec.num_heads, NOPE=spec.nope_dim, HEADS=TURNED_HEADS,
        NEIGHBOURS=spec.turns_neighbours, **_sizes(spec), num_warps=4,
    )  # fmt: skip
    return turned


def attend(
    absorbed: Tensor,
    turned: Tensor,
    cache: Tensor,
    step: DeviceStep,
    spec: LatentAttentionSpec,
    *,
    tile: LatentTile,
    num_splits: int,
    split_tokens: int = 0,
) -> Tensor:
    """Each row's sums of latent vectors, [T, heads, rank]."""
    out = torch.empty_like(absorbed)
    num_tiles, num_groups = len(step.tile_seqs), spec.num_heads // tile.group
    is_split = num_splits > 1
    planned = attention.plan_parts(
        num_tiles=num_tiles, num_kv_heads=num_groups, num_splits=num_splits,
        part_rows=tile.block_m, head_dim=spec.rank,
    )  # fmt: skip
    parts = maxima = sums = out  # not looked at
    if is_split:
        parts = out.new_empty((planned.num_rows, spec.rank), dtype=torch.float32)
        maxima = out.new_empty(planned.num_rows, dtype=torch.float32)
        sums = torch.empty_like(maxima)
    for first in range(0, num_tiles, planned.num_tiles):
        count = min(planned.num_tiles, num_tiles - first)
        attend_kernel[(count, num_groups, num_splits)](
            out, parts, maxima, sums, absorbed, turned, cache, step.tile_seqs, step.tile_starts,
            step.seq_starts, step.seq_lens, step.table_starts, step.tables, first, tile.block_m,
            spec.scale * LOG2_E, spec.window or 0, split_tokens,
            GROUP=tile.group, PAGE=cache.shape[1], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            HAS_WINDOW=spec.window is not None, SPLIT=is_split, ALWAYS_MASKED=split_tokens > 0,
            EXACT=out.dtype == torch.float32, **_sizes(spec),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if is_split:
            attention.join_kernel[(count, spec.num_heads)](
                out, parts, maxima, sums, out, step.tile_seqs, step.tile_starts, step.seq_starts,
                first, tile.block_m, num_splits, GROUP=tile.group, HEAD_DIM=spec.rank,
                DIM=triton.next_power_of_2(spec.rank), BLOCK_M=tile.block_m, HAS_SINKS=False,
                num_warps=2,
            )  # fmt: skip
    return out


def walk(
    absorbed: Tensor,
    turned: Tensor,
    cache: Tensor,
    step: DeviceStep,
    spec: LatentAttentionSpec,
    *,
    tile: LatentTile,
) -> Tensor:
    """As `attend`, for a token of each sequence."""
    out = torch.empty_like(absorbed)
    num_tiles, num_heads = len(step.tile_seqs), spec.num_heads
    parts = out.new_empty((num_tiles * num_heads, spec.rank), dtype=torch.float32)
    maxima, sums = out.new_empty((2, num_tiles * num_heads), dtype=torch.float32).unbind()
    sizes = _sizes(spec)
    walk_kernel[(num_tiles, num_heads // tile.group)](
        out, parts, maxima, sums, absorbed, turned, cache, step.tile_seqs, step.tile_starts,
        step.tile_ends, step.seq_tiles, step.seq_lens, step.table_starts, step.tables,
        spec.scale * LOG2_E, spec.window or 0,
        GROUP=tile.group, ROWS=tile.walk_rows, PAGE=cache.shape[1], BLOCK_N=tile.block_n,
        HAS_WINDOW=spec.window is not None, EXACT=out.dtype == torch.float32, **sizes,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    join_kernel[(len(out), num_heads)](
        out, parts, maxima, sums, step.seq_tiles, RANK=sizes["RANK"], RANKS=sizes["RANKS"],
        PARTS=JOINED_PARTS, num_warps=4,
    )  # fmt: skip
    return out


def _sizes(spec: LatentAttentionSpec) -> dict[str, int]:
    return {
        "RANK": spec.rank,
        "RANKS": triton.next_power_of_2(spec.rank),
        "ROPE": spec.rope_dim,
        "ROPES": triton.next_power_of_2(spec.rope_dim),
    }
