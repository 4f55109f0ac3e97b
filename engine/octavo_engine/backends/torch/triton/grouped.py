"""Products with integers of 4 and 8 bits in groups; the input stays as it is.

The integers meet the matrix units as they are, exact in any 16-bit float, and the partial sum of
each group is scaled: nothing is rounded that the checkpoint did not round. From MANY_ROWS rows on,
where it is faster, the weight is expanded to the input's dtype and multiplied as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.integers import assembly, bytes_of, nibbles
from octavo_engine.backends.torch.triton.splits import MIN_STEPS, AxisCut, join

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.packed import GroupedWeight

MANY_ROWS = 129
EXPANDED_ROWS, EXPANDED_TILES = 4, 16  # of a weight, by one program
SUMS = 8  # by one program


@triton.jit(do_not_specialize=["num_rows", "tiles_per_split"])
def grouped_kernel(
    out,  # [splits, M, N]
    x,  # [M, K]
    x_sums,  # float32 [M, K / SPAN]: of what one minimum is for, if HAS_MINIMA
    packed,  # int8 [N, K * BITS / 8]
    scales,  # [N, K / group_size]
    minima,
    row_step,  # from one scale or minimum to the next output's
    group_step,  # and to the next group's
    bias,  # [N], if HAS_BIAS
    num_rows,
    num_outputs,
    num_inputs,
    group_size,
    tiles_per_split,
    BITS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_GROUP: tl.constexpr,  # a tile's two halves share it
    HALF: tl.constexpr,
    ASM: tl.constexpr,  # of `integers.assembly`
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[split] = x · (q * scale + minimum)ᵀ over the split's tiles of 2 * HALF columns."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row_ok, output_ok = rows < num_rows, outputs < num_outputs
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, num_inputs // (2 * HALF))
    acc = grouped_sum(
        x + rows.to(tl.int64)[:, None] * num_inputs, x_sums, rows, packed, scales, minima,
        row_step, group_step, outputs.to(tl.int64), row_ok, output_ok, first, last, num_inputs,
        group_size,
        BITS, HAS_MINIMA, ONE_GROUP, HALF, ASM, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[None, :]
    target = out + (split.to(tl.int64) * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & output_ok[None, :])


@triton.jit
def grouped_sum(
    x_rows,  # pointers [BLOCK_M, 1]
    x_sums,
    sum_rows,  # of x_sums [BLOCK_M]
    packed,
    scales,
    minima,
    row_step,
    group_step,
    weight_rows,  # int64 [BLOCK_N]
    row_ok,
    output_ok,
    first,
    last,
    num_inputs,
    group_size,
    BITS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The products of rows of x and of a weight over tiles [first, last) of its columns. What the
    groups of a tile bring is read one tile ahead: nobody waits for it."""
    SPANS: tl.constexpr = 1 if ONE_GROUP else 2  # of a tile
    columns = tl.arange(0, HALF)
    x_rows = x_rows + columns[None, :]
    row_bytes = num_inputs * BITS // 8
    scale_rows = weight_rows * row_step
    weight_rows = packed + weight_rows[None, :] * row_bytes + columns[:, None]
    sum_rows = x_sums + sum_rows.to(tl.int64) * (num_inputs // (2 * HALF) * SPANS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ahead = group_of(
        scales, minima, scale_rows, group_step, sum_rows, row_ok, output_ok, first, 0, group_size,
        HAS_MINIMA, SPANS, HALF,
    )  # fmt: skip
    right_ahead = ahead
    if not ONE_GROUP:
        right_ahead = group_of(
            scales, minima, scale_rows, group_step, sum_rows, row_ok, output_ok, first, 1,
            group_size, HAS_MINIMA, SPANS, HALF,
        )  # fmt: skip
    for tile in range(first, last):
        k = tile * 2 * HALF
        left = tl.load(x_rows + k, mask=row_ok[:, None], other=0.0)
        right = tl.load(x_rows + k + HALF, mask=row_ok[:, None], other=0.0)
        if BITS == 4:
            words = tl.load(weight_rows + tile * HALF, mask=output_ok[None, :], other=0)
            low, high = nibbles(words, left.dtype, HAS_MINIMA, ASM)
        else:
            low = tl.load(weight_rows + k, mask=output_ok[None, :], other=0)
            high = tl.load(weight_rows + k + HALF, mask=output_ok[None, :], other=0)
            low, high = bytes_of(low, left.dtype, ASM), bytes_of(high, left.dtype, ASM)
        scale, minimum, sums = ahead
        following = tl.minimum(tile + 1, last - 1)
        ahead = group_of(
            scales, minima, scale_rows, group_step, sum_rows, row_ok, output_ok, following, 0,
            group_size, HAS_MINIMA, SPANS, HALF,
        )  # fmt: skip
        part = tl.dot(left, low, input_precision="ieee")
        if ONE_GROUP:
            part = tl.dot(right, high, part, input_precision="ieee")
            acc += part * scale.to(tl.float32)[None, :]
        else:
            acc += part * scale.to(tl.float32)[None, :]
            part = tl.dot(right, high, input_precision="ieee")
            right_scale, right_minimum, right_sums = right_ahead
            right_ahead = group_of(
                scales, minima, scale_rows, group_step, sum_rows, row_ok, output_ok, following, 1,
                group_size, HAS_MINIMA, SPANS, HALF,
            )  # fmt: skip
            acc += part * right_scale.to(tl.float32)[None, :]
            if HAS_MINIMA:
                acc += right_sums[:, None] * right_minimum.to(tl.float32)[None, :]
        if HAS_MINIMA:
            acc += sums[:, None] * minimum.to(tl.float32)[None, :]
    return acc


@triton.jit
def group_of(
    scales,
    minima,
    scale_rows,
    group_step,
    sum_rows,
    row_ok,
    output_ok,
    tile,
    half,
    group_size,
    HAS_MINIMA: tl.constexpr,
    SPANS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Scales and minima of a tile, or of one of its halves, and the sums of x that meet the latter
    (if there are none, what is not looked at)."""
    group = (tile * 2 + half) * HALF // group_size
    places = scale_rows + group.to(tl.int64) * group_step
    scale = tl.load(scales + places, mask=output_ok, other=0.0)
    minimum, sums = scale, scale
    if HAS_MINIMA:
        minimum = tl.load(minima + places, mask=output_ok, other=0.0)
        sums = tl.load(sum_rows + tile * SPANS + half, mask=row_ok, other=0.0)
    return scale, minimum, sums


@triton.jit(do_not_specialize=["num_sums"])
def sums_kernel(out, x, num_sums, SPAN: tl.constexpr, SUMS: tl.constexpr):
    """out[i] = the sum of x[i * SPAN : (i + 1) * SPAN]"""
    index = tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    places = index.to(tl.int64)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    values = tl.load(x + places, mask=(index < num_sums)[:, None], other=0.0)
    tl.store(out + index, tl.sum(values.to(tl.float32), 1), mask=index < num_sums)


def sums_for(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Of rows of inputs, the sums that each minimum of the weight meets."""
    if weight.minima is None:
        return x  # not looked at
    span = 2 * weight.half if is_one_group(weight) else weight.half
    sums = x.new_empty((len(x), x.shape[1] // span), dtype=torch.float32)
    sums_kernel[(triton.cdiv(sums.numel(), SUMS),)](
        sums, x, sums.numel(), SPAN=span, SUMS=SUMS, num_warps=4
    )
    return sums


def is_one_group(weight: GroupedWeight) -> bool:
    """Whether both halves of a tile have the same scale."""
    return weight.group_size % (2 * weight.half) == 0


def assembly_of(weight: GroupedWeight, dtype: torch.dtype) -> str:
    """How the weight's integers become floats of a dtype where its kernels run."""
    is_compiled = isinstance(grouped_kernel, triton.runtime.JITFunction)
    return assembly(
        weight.bits, dtype,
        has_minima=weight.minima is not None, is_nvidia=is_compiled and torch.version.hip is None,
    )  # fmt: skip


def matmul(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    num_processors: int,
    batch_invariant: bool = False,
) -> Tensor:
    """x · weightᵀ + bias."""
    x = weight.arranged(x).contiguous()
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    if num_rows == 0:
        return x.new_empty((0, num_outputs), dtype=out_dtype)
    if not batch_invariant and num_rows >= MANY_ROWS and out_dtype == x.dtype != torch.float32:
        return torch.nn.functional.linear(x, expand(weight, x.dtype), bias)
    num_tiles = num_inputs // (2 * weight.half)
    work = choose_cut(
        num_rows, num_outputs, num_tiles, num_processors,
        is_one_group=is_one_group(weight), batch_invariant=batch_invariant,
    )  # fmt: skip
    parts = _parts(x, work, num_outputs, out_dtype)
    own_bias = bias if work.num_splits == 1 else None
    grouped_kernel[(triton.cdiv(num_rows, work.block_m), triton.cdiv(num_outputs, work.block_n),
                    work.num_splits)](
        parts, x, sums_for(x, weight), weight.packed, weight.scales,
        weight.scales if weight.minima is None else weight.minima, *weight.scales.stride(),
        weight.scales if own_bias is None else own_bias,
        num_rows, num_outputs, num_inputs, weight.group_size, work.steps_per_split,
        BITS=weight.bits, HAS_MINIMA=weight.minima is not None, HAS_BIAS=own_bias is not None,
        ONE_GROUP=is_one_group(weight), HALF=weight.half,
        ASM=assembly_of(weight, x.dtype), BLOCK_M=work.block_m, BLOCK_N=work.block_n,
        num_warps=work.num_warps, num_stages=work.num_stages,
    )  # fmt: skip
    return parts[0] if work.num_splits == 1 else join(parts, bias, out_dtype)


def choose_cut(
    num_rows: int,
    num_outputs: int,
    num_tiles: int,
    num_processors: int,
    *,
    is_one_group: bool,
    batch_invariant: bool,
) -> AxisCut:
    """What was fastest on an H100 for the layers of an 8B model. Programs that read several scales
    a tile wait more, so that more of them take turns."""
    if batch_invariant:
        return AxisCut(64, 64, 1, num_tiles, 4, 3)
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    narrow = block_m == 32 or (16 < num_rows <= 64 and num_outputs < 128 * num_processors)
    block_n = 64 if narrow else 128
    programs = -(-num_rows // block_m) * -(-num_outputs // block_n)
    turns, most = (2, 4) if block_m == 64 else (3, 8) if is_one_group else (6, 8)
    wanted = min(most, turns * num_processors // programs, num_tiles // MIN_STEPS)
    steps = -(-num_tiles // max(1, wanted))
    return AxisCut(block_m, block_n, -(-num_tiles // steps), steps, 4, 3)


def _parts(x: Tensor, work: AxisCut, num_outputs: int, out_dtype: torch.dtype) -> Tensor:
    dtype = out_dtype if work.num_splits == 1 else torch.float32
    return x.new_empty((work.num_splits, len(x), num_outputs), dtype=dtype)


@triton.jit
def expand_kernel(
    out,  # [N, K]
    packed,
    scales,
    minima,
    row_step,
    group_step,
    num_outputs,
    num_inputs,
    group_size,
    BITS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HALF: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """TILES tiles of 2 * HALF columns, of ROWS rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles, lanes = tl.program_id(1) * TILES + tl.arange(0, TILES), tl.arange(0, HALF)
    columns = tiles[:, None] * (2 * HALF) + lanes[None, :]
    pair_ok = (rows < num_outputs)[:, None] & (tiles < num_inputs // (2 * HALF))[None, :]
    mask = pair_ok[:, :, None]
    rows = rows.to(tl.int64)
    row_bytes = rows[:, None, None] * (num_inputs * BITS // 8)
    target = out + rows[:, None, None] * num_inputs + columns[None, :, :]
    group_rows = rows[:, None] * row_step
    if BITS == 4:
        places = tiles[:, None] * HALF + lanes[None, :]
        words = tl.load(packed + row_bytes + places[None, :, :], mask=mask, other=0)
        low, high = words & 15, (words >> 4) & 15
        if not HAS_MINIMA:
            low, high = low - 8, high - 8
    else:
        low = tl.load(packed + row_bytes + columns[None, :, :], mask=mask, other=0)
        high = tl.load(packed + row_bytes + columns[None, :, :] + HALF, mask=mask, other=0)
    for half in tl.static_range(2):
        group = group_rows + ((tiles * 2 + half) * HALF // group_size)[None, :] * group_step
        scale = tl.load(scales + group, mask=pair_ok, other=0.0).to(tl.float32)
        values = (low if half == 0 else high).to(tl.float32) * scale[:, :, None]
        if HAS_MINIMA:
            minimum = tl.load(minima + group, mask=pair_ok, other=0.0).to(tl.float32)
            values += minimum[:, :, None]
        tl.store(target + half * HALF, values.to(out.dtype.element_ty), mask=mask)


def expand(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight's values, columns as they lie."""
    num_outputs, num_inputs = weight.shape
    out = torch.empty((num_outputs, num_inputs), dtype=dtype, device=weight.packed.device)
    num_tiles = num_inputs // (2 * weight.half)
    expand_kernel[(triton.cdiv(num_outputs, EXPANDED_ROWS),
                   triton.cdiv(num_tiles, EXPANDED_TILES))](
        out, weight.packed, weight.scales,
        weight.scales if weight.minima is None else weight.minima, *weight.scales.stride(),
        num_outputs, num_inputs, weight.group_size,
        BITS=weight.bits, HAS_MINIMA=weight.minima is not None, HALF=weight.half,
        TILES=EXPANDED_TILES, ROWS=EXPANDED_ROWS, num_warps=4,
    )  # fmt: skip
    return out
