"""Products of one row: nothing but reading the weights counts.

Libraries cut such products for the matrix units, and where there are few outputs they sum parts in
a second launch. Here a program reads whole rows of the weight, a few at a time, and every thread
multiplies what it has read. With two rows and more the matrix units are faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo_engine.backends.torch.packed import GroupedWeight

BLOCK_N, BLOCK_K = 4, 2048  # outputs of a program, and inputs at a time
GROUPED_OUTPUTS, GROUPED_COLUMNS = 4, 2048


@triton.jit
def gemv_kernel(
    out,  # [N]
    x,  # [K]
    weight,  # [N, K]
    bias,  # [N]
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # no block of outputs or inputs is partly filled
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_ok = outputs < num_outputs
    inputs = tl.arange(0, BLOCK_K)
    places = weight + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, num_inputs, BLOCK_K):
        if IS_WHOLE:
            w = tl.load(places + k, eviction_policy="evict_first")
            values = tl.load(x + k + inputs)
        else:
            input_ok = k + inputs < num_inputs
            w = tl.load(places + k, mask=output_ok[:, None] & input_ok[None, :], other=0.0)
            values = tl.load(x + k + inputs, mask=input_ok, other=0.0)
        acc += w.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(acc, 1)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=output_ok)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [1, K] · weightᵀ + bias."""
    num_outputs, num_inputs = weight.shape
    block_k = min(BLOCK_K, max(256, triton.next_power_of_2(num_inputs)))
    out = x.new_empty((1, num_outputs), dtype=out_dtype)
    gemv_kernel[(triton.cdiv(num_outputs, BLOCK_N),)](
        out, x, weight, weight if bias is None else bias, num_outputs, num_inputs,
        HAS_BIAS=bias is not None, BLOCK_N=BLOCK_N, BLOCK_K=block_k,
        IS_WHOLE=num_outputs % BLOCK_N == 0 and num_inputs % block_k == 0,
        num_warps=max(1, block_k // 256),
    )  # fmt: skip
    return out


@triton.jit
def grouped_gemv_kernel(
    out,  # [N]
    x,  # [K]
    packed,  # int8 [N, K * BITS / 8]
    scales,  # [N, K / group_size]
    minima,
    bias,
    num_outputs,
    num_inputs,
    group_size,
    BITS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_GROUP: tl.constexpr,  # a tile's two halves share it
    HALF: tl.constexpr,
    TILES: tl.constexpr,  # of 2 * HALF columns, at a time
    BLOCK_N: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_ok = outputs < num_outputs
    tiles, lanes = tl.arange(0, TILES), tl.arange(0, HALF)
    num_tiles = num_inputs // (2 * HALF)
    num_groups = num_inputs // group_size
    weight_rows = packed + outputs.to(tl.int64)[:, None, None] * (num_inputs * BITS // 8)
    scale_rows = outputs.to(tl.int64)[:, None] * num_groups
    acc = tl.zeros([BLOCK_N, TILES], tl.float32)
    for first in range(0, num_tiles, TILES):
        tile = first + tiles
        tile_ok = tile < num_tiles
        columns = tile[:, None] * (2 * HALF) + lanes[None, :]
        left = tl.load(x + columns, mask=tile_ok[:, None], other=0.0)
        right = tl.load(x + columns + HALF, mask=tile_ok[:, None], other=0.0)
        left, right = left.to(tl.float32), right.to(tl.float32)
        mask = output_ok[:, None, None] & tile_ok[None, :, None]
        if BITS == 4:
            places = tile[:, None] * HALF + lanes[None, :]
            words = tl.load(weight_rows + places[None, :, :], mask=mask, other=0)
            low, high = words & 15, (words >> 4) & 15
            if not HAS_MINIMA:
                low, high = low - 8, high - 8
        else:
            low = tl.load(weight_rows + columns[None, :, :], mask=mask, other=0)
            high = tl.load(weight_rows + columns[None, :, :] + HALF, mask=mask, other=0)
        low, high = low.to(tl.float32) * left[None, :, :], high.to(tl.float32) * right[None, :, :]
        group = scale_rows + (tile * (2 * HALF) // group_size)[None, :]
        group_ok = output_ok[:, None] & tile_ok[None, :]
        scale = tl.load(scales + group, mask=group_ok, other=0.0).to(tl.float32)
        if ONE_GROUP:
            acc += tl.sum(low + high, 2) * scale
            if HAS_MINIMA:
                minimum = tl.load(minima + group, mask=group_ok, other=0.0).to(tl.float32)
                acc += tl.sum(left + right, 1)[None, :] * minimum
        else:
            other = scale_rows + ((tile * (2 * HALF) + HALF) // group_size)[None, :]
            other_scale = tl.load(scales + other, mask=group_ok, other=0.0).to(tl.float32)
            acc += tl.sum(low, 2) * scale + tl.sum(high, 2) * other_scale
            if HAS_MINIMA:
                minimum = tl.load(minima + group, mask=group_ok, other=0.0).to(tl.float32)
                other_minimum = tl.load(minima + other, mask=group_ok, other=0.0).to(tl.float32)
                acc += tl.sum(left, 1)[None, :] * minimum
                acc += tl.sum(right, 1)[None, :] * other_minimum
    result = tl.sum(acc, 1)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=output_ok)


def grouped_matmul(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """x [1, K], arranged as the weight is, · weightᵀ + bias."""
    num_outputs, num_inputs = weight.shape
    out = x.new_empty((1, num_outputs), dtype=out_dtype)
    tiles = min(
        triton.next_power_of_2(num_inputs // (2 * weight.half)),
        GROUPED_COLUMNS // (2 * weight.half),
    )
    grouped_gemv_kernel[(triton.cdiv(num_outputs, GROUPED_OUTPUTS),)](
        out, x, weight.packed, weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        weight.scales if bias is None else bias,
        num_outputs, num_inputs, weight.group_size,
        BITS=weight.bits, HAS_MINIMA=weight.minima is not None, HAS_BIAS=bias is not None,
        ONE_GROUP=weight.group_size % (2 * weight.half) == 0, HALF=weight.half,
        TILES=tiles, BLOCK_N=GROUPED_OUTPUTS, num_warps=4,
    )  # fmt: skip
    return out
