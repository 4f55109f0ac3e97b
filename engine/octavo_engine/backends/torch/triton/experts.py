"""A mixture of experts' products: the rows of each expert in tiles of their own.

Nothing of it waits for the host: how many tiles there are is bounded by the shapes, and a tile of
no expert ends at once, so a graph may hold it. Padding rows are read as zeros and written nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.packed import PackedExperts
from octavo_engine.backends.torch.triton.grouped import grouped_sum

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.packed import DeviceExperts

BLOCK_N, BLOCK_K = 64, 64
FEW_PER_EXPERT, MANY_PER_EXPERT = 16, 64  # rows of a tile


class Tiles(NamedTuple):
    """Pairs of token and expert sorted by expert, each expert's padded to whole tiles."""

    pairs: Tensor  # int32 [tiles * block_m]: token * top_k + place; -1 is padding
    experts: Tensor  # int32 [tiles]: -1 is none
    block_m: int


@triton.jit
def experts_kernel(
    out,  # [pairs, N]
    x,  # [pairs / PAIRS_PER_ROW, K]
    weights,  # [experts, N, K]
    tile_pairs,
    tile_experts,
    num_outputs,
    num_inputs,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[pair] = x[pair / PAIRS_PER_ROW] · weights[its expert]ᵀ"""
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
        target = out + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        mask = row_ok[:, None] & output_ok[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def grouped_experts_kernel(
    out,  # [pairs, N]
    x,  # [pairs / PAIRS_PER_ROW, K]
    packed,  # as grouped_kernel's, [experts * N, …]
    scales,
    minima,
    tile_pairs,
    tile_experts,
    num_outputs,
    num_inputs,
    group_size,
    PAIRS_PER_ROW: tl.constexpr,
    BITS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    HALF: tl.constexpr,
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
            packed, scales, minima, expert.to(tl.int64) * num_outputs + outputs,
            row_ok, output_ok, 0, num_inputs // (2 * HALF), num_inputs, group_size,
            BITS, HAS_MINIMA, ONE_GROUP, HALF, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        target = out + pairs.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        mask = row_ok[:, None] & output_ok[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


def cut_tiles(chosen: Tensor, num_experts: int, *, batch_invariant: bool) -> Tiles:
    """`chosen` [T, top_k]: each token's experts."""
    num_pairs = chosen.numel()
    is_few = num_pairs < FEW_PER_EXPERT * num_experts and not batch_invariant
    block_m = FEW_PER_EXPERT if is_few else MANY_PER_EXPERT
    # Each expert that is met at all leaves less than a tile empty.
    num_tiles = triton.cdiv(num_pairs, block_m) + min(num_experts, num_pairs)
    flat = chosen.reshape(-1)
    experts, order = torch.sort(flat, stable=True)
    all_experts = torch.arange(num_experts, device=flat.device)
    counts = (flat[:, None] == all_experts).sum(0)
    own_tiles = (counts + block_m - 1) // block_m
    end_tiles = own_tiles.cumsum(0)
    first_places = (end_tiles - own_tiles) * block_m
    ranks = torch.arange(num_pairs, device=flat.device) - (counts.cumsum(0) - counts)[experts]
    pairs = torch.full((num_tiles * block_m,), -1, dtype=torch.int32, device=flat.device)
    pairs[first_places[experts] + ranks] = order.int()
    tiles = torch.arange(num_tiles, device=flat.device)
    owners = torch.searchsorted(end_tiles, tiles, right=True)
    owners = torch.where(owners < num_experts, owners, -1)
    return Tiles(pairs, owners.int(), block_m)


def product(x: Tensor, weights: DeviceExperts, tiles: Tiles, num_pairs: int) -> Tensor:
    """A row for each pair, from x with a row for each pair or for each token."""
    _, num_outputs, num_inputs = weights.shape
    out = x.new_empty((num_pairs, num_outputs))
    if num_pairs and isinstance(weights, PackedExperts):
        weight = weights.weight
        x = weight.arranged(x).contiguous()
        grouped_experts_kernel[(len(tiles.experts), triton.cdiv(num_outputs, BLOCK_N))](
            out, x, weight.packed, weight.scales,
            weight.scales if weight.minima is None else weight.minima,
            tiles.pairs, tiles.experts, num_outputs, num_inputs, weight.group_size,
            PAIRS_PER_ROW=num_pairs // len(x), BITS=weight.bits,
            HAS_MINIMA=weight.minima is not None,
            ONE_GROUP=weight.group_size % (2 * weight.half) == 0, HALF=weight.half,
            BLOCK_M=tiles.block_m, BLOCK_N=BLOCK_N, num_warps=4, num_stages=3,
        )  # fmt: skip
    elif num_pairs:  # then x has rows
        experts_kernel[(len(tiles.experts), triton.cdiv(num_outputs, BLOCK_N))](
            out, x, weights, tiles.pairs, tiles.experts, num_outputs, num_inputs,
            PAIRS_PER_ROW=num_pairs // len(x), BLOCK_M=tiles.block_m, BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
