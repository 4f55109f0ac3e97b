"""A mixture of experts' products: the rows of each expert in tiles of their own.

Padding rows are read as zeros and written nowhere; `routing.py` cuts the tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.packed import BiasedExperts, GroupedWeight, PackedExperts
from octavo_engine.backends.torch.triton.grouped import (
    assembly_of,
    grouped_sum,
    is_one_group,
    sums_for,
)
from octavo_engine.backends.torch.triton.scaled import BLOCK_K as SCALED_BLOCK_K
from octavo_engine.backends.torch.triton.scaled import round_rows, scaled_sum

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.packed import DeviceExperts, ScaledWeight
    from octavo_engine.backends.torch.triton.routing import Tiles

BLOCK_N, BLOCK_K = 64, 64


@triton.jit
def experts_kernel(
    out,  # [pairs, N]
    x,  # [pairs / PAIRS_PER_ROW, K]
    weights,  # [experts, N, K]
    bias,  # [experts, N], if HAS_BIAS
    tile_pairs,
    tile_experts,
    num_outputs,
    num_inputs,
    PAIRS_PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[pair] = x[pair / PAIRS_PER_ROW] · weights[its expert]ᵀ + bias[its expert]"""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        pairs = tl.load(tile_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_ok, output_ok = pairs >= 0, outputs < num_outputs
        x_rows = x + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * num_inputs
        first = weights + expert.to(tl.int64) * num_outputs * num_inputs
        weight_rows = first + outputs.to(tl.int64)[None, :] * num_inputs
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, num_inputs, BLOCK_K):
            inputs = k + tl.arange(0, BLOCK_K)
            input_ok = inputs < num_inputs
            a_mask = row_ok[:, None] & input_ok[None, :]
            a = tl.load(x_rows + inputs[None, :], mask=a_mask, other=0.0)
            b_mask = input_ok[:, None] & output_ok[None, :]
            b = tl.load(weight_rows + inputs[:, None], mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if HAS_BIAS:
            own = bias + expert.to(tl.int64) * num_outputs + outputs
            acc += tl.load(own, mask=output_ok, other=0.0).to(tl.float32)[None, :]
        target = out + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        mask = row_ok[:, None] & output_ok[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def grouped_experts_kernel(
    out,  # [pairs, N]
    x,  # [pairs / PAIRS_PER_ROW, K]
    x_sums,  # as grouped_kernel's, of rows of x
    packed,  # and these, [experts * N, …]
    scales,
    minima,
    row_step,
    group_step,
    bias,
    tile_pairs,
    tile_experts,
    num_outputs,
    num_inputs,
    group_size,
    PAIRS_PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As experts_kernel, of weights in groups."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        pairs = tl.load(tile_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_ok, output_ok = pairs >= 0, outputs < num_outputs
        acc = grouped_sum(
            x + (pairs // PAIRS_PER_ROW).to(tl.int64)[:, None] * num_inputs,
            x_sums, pairs // PAIRS_PER_ROW, packed, scales, minima, row_step, group_step,
            expert.to(tl.int64) * num_outputs + outputs, row_ok, output_ok,
            0, num_inputs // (2 * HALF), num_inputs, group_size,
            BITS, HAS_MINIMA, ONE_GROUP, HALF, ASM, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if HAS_BIAS:
            own = bias + expert.to(tl.int64) * num_outputs + outputs
            acc += tl.load(own, mask=output_ok, other=0.0).to(tl.float32)[None, :]
        target = out + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        mask = row_ok[:, None] & output_ok[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def scaled_experts_kernel(
    out,  # [pairs, N]
    x,  # [pairs / PAIRS_PER_ROW, K], rounded
    x_scales,
    values,  # [experts * N, K]
    scales,  # [experts * N, blocks]
    bias,
    tile_pairs,
    tile_experts,
    num_outputs,
    num_inputs,
    num_blocks,
    PAIRS_PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As experts_kernel, of int8 or FP8 on both sides."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= 0:
        pairs = tl.load(tile_pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        row_ok, output_ok = pairs >= 0, outputs < num_outputs
        result = scaled_sum(
            x, x_scales, values, scales, (pairs // PAIRS_PER_ROW).to(tl.int64),
            expert.to(tl.int64) * num_outputs + outputs, row_ok, output_ok, 0,
            tl.cdiv(num_inputs, BLOCK_K), num_inputs, num_blocks,
            IS_INTEGER, IN_BLOCKS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            own = bias + expert.to(tl.int64) * num_outputs + outputs
            result += tl.load(own, mask=output_ok, other=0.0).to(tl.float32)[None, :]
        target = out + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        mask = row_ok[:, None] & output_ok[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)


def product(x: Tensor, weights: DeviceExperts, tiles: Tiles, num_pairs: int) -> Tensor:
    """A row for each pair, from x with a row for each pair or for each token."""
    _, num_outputs, num_inputs = weights.shape
    out = x.new_empty((num_pairs, num_outputs))
    if not num_pairs:  # then x may have no rows
        return out
    grid = (len(tiles.experts), triton.cdiv(num_outputs, BLOCK_N))
    bias: Tensor | None = None
    if isinstance(weights, BiasedExperts):
        bias, weights = weights.bias, weights.weights
    own_bias = out if bias is None else bias
    common = {
        "PAIRS_PER_ROW": num_pairs // len(x), "HAS_BIAS": bias is not None,
        "BLOCK_M": tiles.block_m, "BLOCK_N": BLOCK_N, "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    if not isinstance(weights, PackedExperts):
        experts_kernel[grid](
            out, x, weights, own_bias, tiles.pairs, tiles.experts, num_outputs, num_inputs,
            BLOCK_K=BLOCK_K, **common,
        )  # fmt: skip
    elif isinstance(weights.weight, GroupedWeight):
        weight = weights.weight
        x = weight.arranged(x).contiguous()
        grouped_experts_kernel[grid](
            out, x, sums_for(x, weight), weight.packed, weight.scales,
            weight.scales if weight.minima is None else weight.minima, *weight.scales.stride(),
            own_bias,
            tiles.pairs, tiles.experts, num_outputs, num_inputs, weight.group_size,
            BITS=weight.bits, HAS_MINIMA=weight.minima is not None,
            ONE_GROUP=is_one_group(weight), HALF=weight.half,
            ASM=assembly_of(weight, x.dtype), **common,
        )  # fmt: skip
    else:
        _scaled_product(out, x, weights.weight, own_bias, tiles, grid, common)
    return out


def _scaled_product(
    out: Tensor,
    x: Tensor,
    weight: ScaledWeight,
    bias: Tensor,
    tiles: Tiles,
    grid: tuple[int, int],
    common: dict[str, int],
) -> None:
    num_inputs, dtype = x.shape[1], weight.values.dtype
    in_blocks = weight.block < num_inputs
    rounded = round_rows(x.contiguous(), dtype, weight.block)
    scaled_experts_kernel[grid](
        out, rounded.values, rounded.scales, weight.values, weight.scales, bias,
        tiles.pairs, tiles.experts, out.shape[1], num_inputs, weight.scales.shape[1],
        IS_INTEGER=dtype == torch.int8, IN_BLOCKS=in_blocks,
        BLOCK_K=weight.block if in_blocks else SCALED_BLOCK_K, **common,
    )  # fmt: skip
