"""What models that pool need besides: attention over whole texts that lie one behind the other;
layer norms, alone or with the residual sum; a row for each text from its tokens'.

A program of attention holds BLOCK_Q tokens of one text times the GROUP query heads that share a kv
head, and walks over the text's tokens BLOCK_N at a time with a running maximum and sum. Tiles
without a text, which graphs have room for, end at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.attention import LOG2_E

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.operands import NormWeights
    from octavo_engine.backends.torch.text_step import TextStep
    from octavo_engine.ops import AttentionSpec, Pool

LONG_TEXT = 1024  # tokens; models that read longer ones have larger tiles
POOLED_COLUMNS = 128  # of a program
POOLED_ROWS = 32  # tokens that it reads at once


class TextTile(NamedTuple):
    """How a program's work is cut, and the launch that suits it."""

    block_m: int  # rows: tokens times query heads of a group
    block_n: int  # tokens looked at in one go
    num_warps: int
    num_stages: int


def choose_tile(*, group: int, head_dim: int, itemsize: int, max_text_len: int) -> TextTile:
    """Small tiles waste less of short texts, large ones read keys less often."""
    least = max(16, triton.next_power_of_2(group))
    if itemsize == 4:  # no matrix units for exact float32: for checking, not for speed
        return TextTile(least, 16, 2, 1)
    if head_dim > 128:
        return TextTile(max(64, least), 32, 8, 2)
    if max_text_len > LONG_TEXT or least > 64:
        return TextTile(max(128, least), 64, 8, 3)
    return TextTile(64, 64, 4, 3)


@triton.jit
def look_at_text(
    maxima,
    sums,
    acc,
    q_rows,  # [rows, DIM]
    k_first,  # the text's first key, of the head
    v_first,
    n,  # the first of BLOCK_N tokens
    low,
    high,
    positions,  # [rows]
    slopes,  # [rows], if HAS_ALIBI
    window,
    score_scale,
    soft_cap,
    KV_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: all rows see all of the tokens
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The running maximum, sum and average of values, after BLOCK_N more tokens."""
    columns = n + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM)
    places = columns.to(tl.int64) * KV_STRIDE
    k_rows = k_first + places[None, :] + dims[:, None]
    v_rows = v_first + places[:, None] + dims[None, :]
    column_ok = (columns >= low) & (columns < high)
    if IS_MASKED:  # behind a text lies another, or memory that holds anything
        dim_ok = dims < HEAD_DIM
        k = tl.load(k_rows, mask=dim_ok[:, None] & column_ok[None, :], other=0.0)
        v = tl.load(v_rows, mask=column_ok[:, None] & dim_ok[None, :], other=0.0)
    elif HEAD_DIM == DIM:
        k, v = tl.load(k_rows), tl.load(v_rows)
    else:
        k = tl.load(k_rows, mask=dims[:, None] < HEAD_DIM, other=0.0)
        v = tl.load(v_rows, mask=dims[None, :] < HEAD_DIM, other=0.0)
    if EXACT:
        scores = tl.dot(q_rows, k, input_precision="ieee") * score_scale
    else:
        scores = tl.dot(q_rows, k) * score_scale
    if HAS_CAP:
        # tanh by one exponential, whose power stays within float32.
        powers = tl.minimum(scores / soft_cap * 2.8853900817779268, 120.0)
        scores = soft_cap * (1 - 2 / (tl.exp2(powers) + 1))
        scores = scores * 1.4426950408889634
    if HAS_ALIBI:
        distance = (columns[None, :] - positions[:, None]).to(tl.float32)
        scores += slopes[:, None] * distance * 1.4426950408889634
    if IS_MASKED:
        seen = column_ok[None, :] & (positions[:, None] >= 0)
        if IS_CAUSAL:
            seen = seen & (columns[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (columns[None, :] > positions[:, None] - window)
            seen = seen & (columns[None, :] < positions[:, None] + window)
        scores = tl.where(seen, scores, -float("inf"))
    new_maxima = tl.maximum(maxima, tl.max(scores, 1))
    pivots = new_maxima
    if IS_MASKED:  # a row that has seen nothing yet has no maximum to subtract
        pivots = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
    weights = tl.exp2(scores - pivots[:, None])
    fade = tl.exp2(maxima - pivots)
    acc = acc * fade[:, None]
    if EXACT:
        acc = tl.dot(weights, v, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)
    return new_maxima, sums * fade + tl.sum(weights, 1), acc


@triton.jit
def attend_texts_kernel(
    out,  # [T, num_heads * HEAD_DIM]
    q,  # [T, Q_STRIDE]: the heads come first
    k,  # [T, KV_STRIDE]
    v,
    slopes,  # [num_heads] f32, if HAS_ALIBI
    tile_texts,  # -1: no text
    tile_starts,
    starts,  # [B + 1]
    score_scale,  # scale, times log2(e) unless there is a soft cap
    soft_cap,
    window,
    Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM, up to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    EXACT: tl.constexpr,  # float32 products as they are, not in tf32
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    text = tl.load(tile_texts + tile)
    first = tl.load(tile_starts + tile)
    if text >= 0:
        begin = tl.load(starts + text).to(tl.int64)
        count = (tl.load(starts + text + 1) - begin).to(tl.int32)
        rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
        positions = first + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        row_ok = (rows < BLOCK_Q * GROUP) & (positions < count)
        q_mask = row_ok[:, None] & (dims < HEAD_DIM)[None, :]
        q_places = (begin + positions) * Q_STRIDE + heads * HEAD_DIM
        q_rows = tl.load(q + q_places[:, None] + dims[None, :], mask=q_mask, other=0.0)
        row_slopes = tl.zeros([BLOCK_M], tl.float32)
        if HAS_ALIBI:
            row_slopes = tl.load(slopes + heads, mask=row_ok, other=0.0)
        k_first = k + begin * KV_STRIDE + kv_head * HEAD_DIM
        v_first = v + begin * KV_STRIDE + kv_head * HEAD_DIM

        # [low, high) is what some row of the tile sees; up to `whole` all rows see all.
        low, high = 0, count
        if IS_CAUSAL:
            high = tl.minimum(count, first + BLOCK_Q)
        if HAS_WINDOW:
            low = tl.maximum(first - window + 1, 0)
            high = tl.minimum(high, first + BLOCK_Q - 1 + window)
        start = low // BLOCK_N * BLOCK_N
        whole = start
        if not HAS_WINDOW:
            reach = count
            if IS_CAUSAL:
                reach = first + 1
            whole = reach // BLOCK_N * BLOCK_N
        maxima = tl.full([BLOCK_M], -float("inf"), tl.float32)
        sums = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        for n in range(start, whole, BLOCK_N):
            maxima, sums, acc = look_at_text(
                maxima, sums, acc, q_rows, k_first, v_first, n, low, high, positions, row_slopes,
                window, score_scale, soft_cap, KV_STRIDE, HEAD_DIM, DIM, BLOCK_N, False, IS_CAUSAL,
                HAS_WINDOW, HAS_CAP, HAS_ALIBI, EXACT,
            )  # fmt: skip
        for n in range(whole, high, BLOCK_N):
            maxima, sums, acc = look_at_text(
                maxima, sums, acc, q_rows, k_first, v_first, n, low, high, positions, row_slopes,
                window, score_scale, soft_cap, KV_STRIDE, HEAD_DIM, DIM, BLOCK_N, True, IS_CAUSAL,
                HAS_WINDOW, HAS_CAP, HAS_ALIBI, EXACT,
            )  # fmt: skip
        result = acc / tl.where(sums > 0, sums, 1.0)[:, None]
        places = (begin + positions) * (num_heads * HEAD_DIM) + heads * HEAD_DIM
        target = out + places[:, None] + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=q_mask)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: TextStep,
    spec: AttentionSpec,
    *,
    slopes: Tensor | None,
    tile: TextTile,
) -> Tensor:
    """q, k and v [T, heads * head_dim], which may be columns of one matrix; of rows of padding,
    which are of no text, the result is 0."""
    shape = (len(q), spec.num_heads * spec.head_dim)
    out = q.new_zeros(shape) if step.host is None else q.new_empty(shape)
    if len(step.tile_texts) == 0:
        return out
    attend_texts_kernel[(len(step.tile_texts), spec.num_kv_heads)](
        out, q, k, v, q if slopes is None else slopes,
        step.tile_texts, step.tile_starts, step.starts,
        spec.scale if spec.soft_cap is not None else spec.scale * LOG2_E,
        spec.soft_cap or 0.0, spec.window or 0,
        Q_STRIDE=q.stride(0), KV_STRIDE=k.stride(0),
        GROUP=spec.num_heads // spec.num_kv_heads, HEAD_DIM=spec.head_dim,
        DIM=max(16, triton.next_power_of_2(spec.head_dim)),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        IS_CAUSAL=spec.is_causal, HAS_WINDOW=spec.window is not None,
        HAS_CAP=spec.soft_cap is not None, HAS_ALIBI=slopes is not None,
        EXACT=q.dtype == torch.float32,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def layer_norm_kernel(
    out,
    total,  # the sum, if KEEPS_SUM
    x,
    y,
    weight,
    bias,
    num_columns,
    scale,
    eps,
    HAS_ADD: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = norm(x + scale * y) * weight + bias, one row."""
    row = tl.program_id(0).to(tl.int64) * num_columns
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    values = tl.load(x + row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADD:
        values += scale * tl.load(y + row + columns, mask=mask, other=0.0).to(tl.float32)
        if KEEPS_SUM:
            tl.store(total + row + columns, values.to(total.dtype.element_ty), mask=mask)
    mean = tl.sum(values, 0) / num_columns
    values = tl.where(mask, values - mean, 0.0)
    variance = tl.sum(values * values, 0) / num_columns
    values = values * (1 / tl.sqrt_rn(variance + eps))
    if HAS_WEIGHT:
        values = values * tl.load(weight + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        values = values + tl.load(bias + columns, mask=mask, other=0.0)
    tl.store(out + row + columns, values.to(out.dtype.element_ty), mask=mask)


def layer_norm(
    x: Tensor, y: Tensor | None, scale: float, norm: NormWeights, *, keeps_sum: bool
) -> tuple[Tensor | None, Tensor]:
    """(x + scale * y in float32 if it is kept, its norm)."""
    weight, bias, eps, dtype = norm
    num_rows, num_columns = x.shape
    out = torch.empty_like(x, dtype=dtype)
    total = None if y is None or not keeps_sum else torch.empty_like(x, dtype=torch.float32)
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        layer_norm_kernel[(num_rows,)](
            out, out if total is None else total, x, x if y is None else y,
            x if weight is None else weight, x if bias is None else bias,
            num_columns, float(scale), eps,
            HAS_ADD=y is not None, KEEPS_SUM=total is not None, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, BLOCK=block, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return total, out


@triton.jit
def pool_kernel(
    out,  # [B, num_columns] f32
    x,  # [T, num_columns]
    starts,
    num_columns,
    HOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of one text, its tokens ROWS at a time."""
    text = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(starts + text).to(tl.int64)
    count = (tl.load(starts + text + 1) - begin).to(tl.int32)
    column_ok = columns < num_columns
    rows = tl.arange(0, ROWS)
    found = tl.zeros([BLOCK], tl.float32)
    if HOW == "max":
        found = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, count, ROWS):
        places = (begin + first + rows) * num_columns
        mask = (first + rows < count)[:, None] & column_ok[None, :]
        values = tl.load(x + places[:, None] + columns[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32)
        if HOW == "max":
            found = tl.maximum(found, tl.max(tl.where(mask, values, -float("inf")), 0))
        elif HOW == "weightedmean":
            found += tl.sum(values * (first + rows + 1).to(tl.float32)[:, None], 0)
        else:
            found += tl.sum(values, 0)
    length = tl.maximum(count, 1).to(tl.float32)  # of padding, which has none
    if HOW == "mean":
        found = found / length
    elif HOW == "mean_sqrt_len":
        found = found / tl.sqrt_rn(length)
    elif HOW == "weightedmean":
        found = found / (length * (length + 1) * 0.5)
    place = text.to(tl.int64) * num_columns + columns
    tl.store(out + place, found, mask=column_ok)


def pool(x: Tensor, step: TextStep, how: Pool) -> Tensor:
    """[B, columns] in float32."""
    num_texts, num_columns = len(step.starts) - 1, x.shape[1]
    out = x.new_empty((num_texts, num_columns), dtype=torch.float32)
    grid = (num_texts, triton.cdiv(num_columns, POOLED_COLUMNS))
    pool_kernel[grid](
        out, x, step.starts, num_columns,
        HOW=how, ROWS=POOLED_ROWS, BLOCK=POOLED_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
