"""Paged attention in one kernel for any mix of prompts and single tokens, and its splits' join.
Steps of single tokens alone have a kernel of their own, `decode.py`.

A program holds BLOCK_Q tokens of one sequence times the GROUP query heads that share a kv head: the
rows of one matrix, so that K and V are read once for all of them. It walks over the sequence's
tokens BLOCK_N at a time with a running maximum and sum. When there are few programs (a long
context, few sequences) the walk is split among several; each leaves its part, and `join` adds them.
Where the parts of all programs would take too much memory, some tiles come after the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import LayerKV
    from octavo_engine.ops import AttentionSpec


LOG2_E = 1.4426950408889634
MAX_SPLITS = 16
MIN_SPLIT_TOKENS = 256  # fewer are not worth a join
PARTS_BYTES = 256 << 20  # that parts may take at once, unless a single tile's take more


class Tile(NamedTuple):
    """How a program's work is cut, and the launch that suits it."""

    block_m: int  # rows: tokens times query heads of a group
    block_n: int  # tokens looked at in one go
    num_warps: int
    num_stages: int


def choose_tile(*, group: int, head_dim: int, itemsize: int, has_scales: bool = False) -> Tile:
    """What was fastest on an H100, whose registers do not spill. The compiler shares stages between
    the numbers of pages and what lies in these, so five hold two blocks of the latter."""
    least = max(16, triton.next_power_of_2(group))
    if itemsize == 4:  # no matrix units for exact float32: for checking, not for speed
        return Tile(least, 16, 4, 1)
    if head_dim > 128:
        return Tile(max(64, least), 32, 8, 2)
    if has_scales:  # what is widened from eight bits lies in registers
        return Tile(max(128, least), 32, 8, 5)
    return Tile(max(128, least), 64, 8, 5)


class Parts(NamedTuple):
    """What splits leave for the join, of so many tiles at once."""

    num_tiles: int
    num_rows: int  # of all of them
    num_bytes: int


def plan_parts(
    *, num_tiles: int, num_kv_heads: int, num_splits: int, part_rows: int, head_dim: int
) -> Parts:
    """`part_rows`: rows of a tile's matrix that are in use."""
    if num_splits <= 1 or num_tiles == 0:
        return Parts(num_tiles, 0, 0)
    tile_rows = num_kv_heads * num_splits * part_rows
    row_bytes = (head_dim + 2) * 4  # with its maximum and its sum
    at_once = max(1, min(num_tiles, PARTS_BYTES // (tile_rows * row_bytes)))
    return Parts(at_once, at_once * tile_rows, at_once * tile_rows * row_bytes)


def count_splits(*, num_programs: int, max_seq_len: int, num_processors: int) -> int:
    """Enough programs for two on each multiprocessor, if the sequences are long enough."""
    wanted = 2 * num_processors // max(1, num_programs)
    return max(1, min(wanted, max_seq_len // MIN_SPLIT_TOKENS, MAX_SPLITS))


@triton.jit
def look_at(
    maxima,
    sums,
    acc,
    q_rows,  # [rows, DIM]
    k_cache,
    v_cache,
    pages,  # of the sequence
    n,  # the first of BLOCK_N tokens
    low,
    high,
    positions,  # [rows]: the last token that each sees
    lows,  # [rows]: the first one, if HAS_WINDOW
    slopes,  # [rows]: of linear biases, times log2(e), if HAS_ALIBI
    kv_head,
    num_kv_heads,
    score_scale,
    soft_cap,
    k_scales,  # [blocks, kv heads, PAGE], of keys and values in eight bits
    v_scales,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: all rows see all of the tokens
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """The running maximum, sum and average of values, after BLOCK_N more tokens."""
    columns = n + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM)
    # Memory outside of [low, high) may hold anything, NaN too, and must not be read.
    column_ok = (columns >= low) & (columns < high)
    if IS_MASKED:
        blocks = tl.load(pages + columns // PAGE, mask=column_ok, other=0)
    else:
        blocks = tl.load(pages + columns // PAGE)
    places = blocks.to(tl.int64) * PAGE + columns % PAGE
    places = (places * num_kv_heads + kv_head) * HEAD_DIM
    k_rows = k_cache + places[None, :] + dims[:, None]
    v_rows = v_cache + places[:, None] + dims[None, :]
    if IS_MASKED:
        dim_ok = dims < HEAD_DIM
        k = tl.load(k_rows, mask=dim_ok[:, None] & column_ok[None, :], other=0.0)
        v = tl.load(v_rows, mask=column_ok[:, None] & dim_ok[None, :], other=0.0)
    elif HEAD_DIM == DIM:
        k, v = tl.load(k_rows), tl.load(v_rows)
    else:
        k = tl.load(k_rows, mask=dims[:, None] < HEAD_DIM, other=0.0)
        v = tl.load(v_rows, mask=dims[None, :] < HEAD_DIM, other=0.0)
    if HAS_SCALES:  # a key's is applied to its score, a value's to its weight
        at = (blocks.to(tl.int64) * num_kv_heads + kv_head) * PAGE + columns % PAGE
        if IS_MASKED:
            k_scale = tl.load(k_scales + at, mask=column_ok, other=0.0).to(tl.float32)
            v_scale = tl.load(v_scales + at, mask=column_ok, other=0.0).to(tl.float32)
        else:
            k_scale = tl.load(k_scales + at).to(tl.float32)
            v_scale = tl.load(v_scales + at).to(tl.float32)
        k, v = k.to(q_rows.dtype), v.to(q_rows.dtype)
    if EXACT:
        scores = tl.dot(q_rows, k, input_precision="ieee") * score_scale
    else:
        scores = tl.dot(q_rows, k) * score_scale
    if HAS_SCALES:
        scores = scores * k_scale[None, :]
    if HAS_CAP:
        # tanh by one exponential, whose power stays within float32.
        powers = tl.minimum(scores / soft_cap * 2.8853900817779268, 120.0)
        scores = soft_cap * (1 - 2 / (tl.exp2(powers) + 1))
        scores = scores * 1.4426950408889634
    if HAS_ALIBI:
        scores += slopes[:, None] * (columns[None, :] - positions[:, None]).to(tl.float32)
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
    shares = weights
    if HAS_SCALES:
        shares = weights * v_scale[None, :]
    if EXACT:
        acc = tl.dot(shares, v, acc, input_precision="ieee")
    else:
        acc = tl.dot(shares.to(v.dtype), v, acc)
    return new_maxima, sums * fade + tl.sum(weights, 1), acc


@triton.jit
def look_along(
    maxima,
    sums,
    acc,
    q_rows,
    k_cache,
    v_cache,
    pages,
    start,
    whole,  # up to here all rows see all tokens
    stop,
    low,
    high,
    positions,
    lows,
    slopes,
    kv_head,
    num_kv_heads,
    score_scale,
    soft_cap,
    k_scales,
    v_scales,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """As `look_at`, over the tokens [start, stop)."""
    for n in range(start, whole, BLOCK_N):
        maxima, sums, acc = look_at(
            maxima, sums, acc, q_rows, k_cache, v_cache, pages, n, low, high, positions, lows,
            slopes, kv_head, num_kv_heads, score_scale, soft_cap, k_scales, v_scales,
            HEAD_DIM, DIM, PAGE, BLOCK_N, False, False, HAS_CAP, HAS_ALIBI, EXACT, HAS_SCALES,
        )  # fmt: skip
    for n in range(whole, stop, BLOCK_N):
        maxima, sums, acc = look_at(
            maxima, sums, acc, q_rows, k_cache, v_cache, pages, n, low, high, positions, lows,
            slopes, kv_head, num_kv_heads, score_scale, soft_cap, k_scales, v_scales,
            HEAD_DIM, DIM, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_CAP, HAS_ALIBI, EXACT, HAS_SCALES,
        )  # fmt: skip
    return maxima, sums, acc


@triton.jit
def first_seen(positions, window, IS_CHUNKED: tl.constexpr):
    """The first token that a window shows at a position: the window ends there, or texts are cut
    into chunks of its length."""
    if IS_CHUNKED:
        return positions // window * window
    return tl.maximum(positions - window + 1, 0)


@triton.jit
def add_sinks(sums, maxima, sinks, heads, mask):
    """The softmax's sums, with each head's sink: a score more, of no value."""
    scores = tl.load(sinks + heads, mask=mask, other=0.0) * 1.4426950408889634
    return sums + tl.exp2(tl.minimum(scores - maxima, 120.0))  # beyond, nothing else counts


@triton.jit(do_not_specialize=["first_tile", "part_rows", "split_tokens"])
def attend_kernel(
    out,  # [T, num_heads * HEAD_DIM]
    parts,  # [tiles, kv heads, splits, part_rows, HEAD_DIM] f32, if SPLIT
    part_maxima,  # [tiles, kv heads, splits, part_rows] f32
    part_sums,
    q,  # [T, num_heads * HEAD_DIM]
    k_cache,  # [blocks, PAGE, kv heads, HEAD_DIM]
    v_cache,
    sinks,  # [num_heads] f32, if HAS_SINKS
    alibi,  # [num_heads] f32, if HAS_ALIBI
    tile_seqs,
    tile_starts,
    seq_starts,
    seq_lens,
    table_starts,
    tables,
    first_tile,  # of this launch
    part_rows,
    score_scale,  # scale, times log2(e) unless there is a soft cap
    soft_cap,
    window,
    split_tokens,  # a part's tokens, a multiple of BLOCK_N; 0: equal parts
    k_scales,  # [blocks, kv heads, PAGE] bf16, if HAS_SCALES
    v_scales,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM, up to a power of two
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    SPLIT: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,  # masks cost time and change the way in which numbers are rounded
    EXACT: tl.constexpr,  # float32 products as they are, not in tf32
    HAS_SCALES: tl.constexpr,  # keys and values are in e4m3
):
    # The last tiles of a prompt look at the most tokens, so they begin first.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    tile = first_tile + place
    num_kv_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    sequence = tl.load(tile_seqs + tile)
    first = tl.load(tile_starts + tile)
    begin = tl.load(seq_starts + sequence)
    count = tl.load(seq_starts + sequence + 1) - begin
    seq_len = tl.load(seq_lens + sequence)
    pages = tables + tl.load(table_starts + sequence)
    context = seq_len - count  # tokens whose k and v were there before this step

    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_ok = (rows < BLOCK_Q * GROUP) & (tokens < count)
    positions = context + tokens
    dims = tl.arange(0, DIM)
    dim_ok = dims < HEAD_DIM
    num_heads = num_kv_heads * GROUP
    row_offsets = ((begin + tokens).to(tl.int64) * num_heads + heads) * HEAD_DIM
    q_mask = row_ok[:, None] & dim_ok[None, :]
    q_rows = tl.load(q + row_offsets[:, None] + dims[None, :], mask=q_mask, other=0.0)

    # [low, high) is what some row of the tile sees. NOTE: memory outside of it may hold anything,
    # NaN too, and must not be read: zero times NaN is NaN.
    high = tl.minimum(context + first + BLOCK_Q, seq_len)
    low = 0
    lows, slopes = positions, positions
    if HAS_WINDOW:
        low = first_seen(context + first, window, IS_CHUNKED)
        lows = first_seen(positions, window, IS_CHUNKED)
    if HAS_ALIBI:
        slopes = tl.load(alibi + heads) * 1.4426950408889634
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

    maxima = tl.full([BLOCK_M], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    # Blocks that every row of the tile sees whole need no masks: of a long context nearly all.
    whole = start
    if not (HAS_WINDOW or ALWAYS_MASKED):
        whole += tl.maximum(tl.minimum(stop, context + first + 1) - start, 0) // BLOCK_N * BLOCK_N
    maxima, sums, acc = look_along(
        maxima, sums, acc, q_rows, k_cache, v_cache, pages, start, whole, stop, low, high,
        positions, lows, slopes, kv_head, num_kv_heads, score_scale, soft_cap, k_scales, v_scales,
        HEAD_DIM, DIM, PAGE, BLOCK_N, HAS_WINDOW, HAS_CAP, HAS_ALIBI, EXACT, HAS_SCALES,
    )  # fmt: skip

    if SPLIT:
        is_used = rows < part_rows
        at = ((place * num_kv_heads + kv_head) * num_splits + split) * part_rows + rows
        tl.store(part_maxima + at, maxima, mask=is_used)
        tl.store(part_sums + at, sums, mask=is_used)
        target = parts + at.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, acc, mask=is_used[:, None] & dim_ok[None, :])
    else:
        if HAS_SINKS:
            sums = add_sinks(sums, maxima, sinks, heads, row_ok)
        result = acc / tl.where(sums > 0, sums, 1.0)[:, None]
        out_rows = out + row_offsets[:, None] + dims[None, :]
        tl.store(out_rows, result.to(out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["first_tile", "part_rows", "num_splits"])
def join_kernel(
    out,
    parts,
    part_maxima,
    part_sums,
    sinks,
    tile_seqs,
    tile_starts,
    seq_starts,
    first_tile,
    part_rows,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One row of one tile: its parts, weighed by how much of the softmax each has seen."""
    tile, row = first_tile + tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    kv_head, member = row // GROUP, row % GROUP
    num_kv_heads = num_heads // GROUP
    sequence = tl.load(tile_seqs + tile)
    first = tl.load(tile_starts + tile)
    begin = tl.load(seq_starts + sequence)
    count = tl.load(seq_starts + sequence + 1) - begin
    dims = tl.arange(0, DIM)
    dim_ok = dims < HEAD_DIM
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    for index in range(tl.minimum(BLOCK_Q, count - first)):
        maximum = tl.full([1], -float("inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([DIM], tl.float32)
        for split in range(num_splits):
            place = (tl.program_id(0) * num_kv_heads + kv_head) * num_splits + split
            place = place * part_rows + index * GROUP + member
            part_max = tl.load(part_maxima + place)
            new_max = tl.maximum(maximum, part_max)
            pivot = tl.where(new_max == -float("inf"), 0.0, new_max)
            fade, weight = tl.exp2(maximum - pivot), tl.exp2(part_max - pivot)
            part = tl.load(parts + place.to(tl.int64) * HEAD_DIM + dims, mask=dim_ok, other=0.0)
            acc = acc * fade + part * weight
            total = total * fade + tl.load(part_sums + place) * weight
            maximum = new_max
        if HAS_SINKS:
            total = add_sinks(total, maximum, sinks, row, row >= 0)
        acc = acc / tl.where(total > 0, total, 1.0)
        token = (begin + first + index).to(tl.int64)
        out_row = out + (token * num_heads + row) * HEAD_DIM + dims
        tl.store(out_row, acc.to(out.dtype.element_ty), mask=dim_ok)


def attend(
    q: Tensor,
    kv: LayerKV,
    step: DeviceStep,
    spec: AttentionSpec,
    *,
    tile: Tile,
    num_splits: int,
    split_tokens: int = 0,
    alibi: Tensor | None = None,
    tiles: range | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, num_heads * head_dim] over the pages of each sequence. `alibi`: the spec's. Of some
    tiles, if given: then the rows of others in `out` stay as they are."""
    k_cache, v_cache, scales = kv
    out = torch.empty_like(q) if out is None else out
    tiles = range(len(step.tile_seqs)) if tiles is None else tiles
    num_tiles = len(tiles)
    if num_tiles == 0:
        return out
    group = spec.num_heads // spec.num_kv_heads
    is_split = num_splits > 1
    part_rows = group if step.is_decode else tile.block_m  # of a single token few are in use
    planned = plan_parts(
        num_tiles=num_tiles, num_kv_heads=spec.num_kv_heads, num_splits=num_splits,
        part_rows=part_rows, head_dim=spec.head_dim,
    )  # fmt: skip
    parts = maxima = sums = out  # not looked at
    if is_split:
        parts = q.new_empty((planned.num_rows, spec.head_dim), dtype=torch.float32)
        maxima = q.new_empty(planned.num_rows, dtype=torch.float32)
        sums = torch.empty_like(maxima)
    sinks = q if spec.sinks is None else spec.sinks
    common = {
        "GROUP": group,
        "HEAD_DIM": spec.head_dim,
        "DIM": triton.next_power_of_2(spec.head_dim),
        "BLOCK_M": tile.block_m,
        "HAS_SINKS": spec.sinks is not None,
    }
    for first in range(tiles.start, tiles.stop, planned.num_tiles):
        count = min(planned.num_tiles, tiles.stop - first)
        attend_kernel[(count, spec.num_kv_heads, num_splits)](
            out, parts, maxima, sums, q, k_cache, v_cache,
            sinks, q if alibi is None else alibi,
            step.tile_seqs, step.tile_starts, step.seq_starts, step.seq_lens,
            step.table_starts, step.tables, first, part_rows,
            spec.scale if spec.soft_cap is not None else spec.scale * LOG2_E,
            spec.soft_cap or 0.0, spec.window or 0, split_tokens, *(scales or (q, q)),
            PAGE=k_cache.shape[1], BLOCK_N=tile.block_n,
            HAS_WINDOW=spec.window is not None, IS_CHUNKED=spec.is_chunked,
            HAS_CAP=spec.soft_cap is not None, HAS_ALIBI=alibi is not None,
            SPLIT=is_split, ALWAYS_MASKED=split_tokens > 0, EXACT=q.dtype == torch.float32,
            HAS_SCALES=scales is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **common,
        )  # fmt: skip
        if is_split:
            join_kernel[(count, spec.num_heads)](
                out, parts, maxima, sums, sinks, step.tile_seqs, step.tile_starts, step.seq_starts,
                first, part_rows, num_splits, num_warps=2, **common,
            )  # fmt: skip
    return out
