"""Which experts a token's row goes to, and back: three launches around a mixture's products.

  route    each token's best experts and their shares
  place    each expert's pairs of token and expert, in tiles of its own
  combine  a token's results, in the order of its own scores: the same sum in any company

Nothing of it waits for the host: how many tiles there are is bounded by the shapes, and a tile of
no expert ends at once, so a graph may hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.ops import ExpertsSpec

FEW_PER_EXPERT, MANY_PER_EXPERT = 16, 64  # rows of a tile
PIECE = 1024  # pairs that are looked at together
COLUMNS = 1024  # of a token that a program sums


class Routed(NamedTuple):
    """Each token's experts, best first."""

    shares: Tensor  # float32 [T, top_k]
    chosen: Tensor  # int32 [T, top_k]


class Tiles(NamedTuple):
    """Pairs of token and expert sorted by expert, each expert's padded to whole tiles."""

    pairs: Tensor  # int32 [tiles * block_m]: token * top_k + place; -1 is padding
    experts: Tensor  # int32 [tiles]: -1 is none, and then `pairs` says nothing
    block_m: int


@triton.jit
def route_kernel(
    shares,  # [T, TOP_K] f32
    chosen,  # [T, TOP_K] i32
    scores,  # [T, experts]
    num_experts,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token. Of equal probabilities the first expert is taken."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    is_there = experts < num_experts
    x = tl.load(scores + token * num_experts + experts, mask=is_there, other=-float("inf"))
    x = x.to(tl.float32)
    # What is no number chooses all the same, and makes its token's result none either.
    is_flawed = (x != x) | (x == float("inf"))
    x = tl.where(is_flawed, 0.0, x)
    powers = tl.exp(x - tl.max(x, 0))
    probabilities = powers / tl.sum(powers, 0)
    left = tl.where(is_there, probabilities, -1.0)
    places = tl.arange(0, PLACES)
    own_shares = tl.zeros([PLACES], tl.float32)
    own_chosen = tl.zeros([PLACES], tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), experts, BLOCK), 0)
        is_best = experts == best
        share = tl.sum(tl.where(is_best, probabilities, 0.0), 0)
        own_shares = tl.where(places == place, share, own_shares)
        own_chosen = tl.where(places == place, best, own_chosen)
        left = tl.where(is_best, -1.0, left)
    if RENORMALISE:
        own_shares = own_shares / tl.sum(own_shares, 0)
    if tl.max(is_flawed.to(tl.int32), 0) > 0:
        own_shares = tl.full([PLACES], float("nan"), tl.float32)
    tl.store(shares + token * TOP_K + places, own_shares, mask=places < TOP_K)
    tl.store(chosen + token * TOP_K + places, own_chosen, mask=places < TOP_K)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def place_kernel(
    tile_pairs,
    tile_experts,
    chosen,  # [pairs] i32
    num_pairs,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,  # more than there are experts
    PIECE: tl.constexpr,
):
    """One expert: counts everybody's pairs, so that it knows where its own tiles begin."""
    expert = tl.program_id(0)
    lanes, bins = tl.arange(0, PIECE), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, PIECE):
        pairs = first + lanes
        owners = tl.load(chosen + pairs, mask=pairs < num_pairs, other=BINS - 1)
        counts += tl.histogram(owners, BINS)
    own_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(bins < expert, own_tiles, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(bins == expert, own_tiles, 0), 0)
    for tile in range(first_tile, end_tile):
        tl.store(tile_experts + tile, expert)
    if expert == tl.num_programs(0) - 1:
        for tile in range(end_tile, num_tiles):
            tl.store(tile_experts + tile, -1)
    at = first_tile * BLOCK_M
    for first in range(0, num_pairs, PIECE):
        pairs = first + lanes
        is_own = tl.load(chosen + pairs, mask=pairs < num_pairs, other=-1) == expert
        ranks = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(tile_pairs + at + ranks - 1, pairs, mask=is_own)
        at += tl.max(ranks, 0)
    rest = at + tl.arange(0, BLOCK_M)
    tl.store(tile_pairs + rest, tl.full([BLOCK_M], -1, tl.int32), mask=rest < end_tile * BLOCK_M)


@triton.jit
def combine_kernel(
    out,  # [T, columns]
    results,  # [T, TOP_K, columns]
    shares,  # [T, TOP_K] f32
    num_columns,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        result = tl.load(results + pair * num_columns + columns, mask=mask, other=0.0)
        total += tl.load(shares + pair) * result.to(tl.float32)
    tl.store(out + token * num_columns + columns, total.to(out.dtype.element_ty), mask=mask)


def route(scores: Tensor, spec: ExpertsSpec) -> Routed:
    """As `plain.choose_experts`."""
    num_tokens, num_experts = scores.shape
    shape = (num_tokens, spec.top_k)
    shares = scores.new_empty(shape, dtype=torch.float32)
    chosen = scores.new_empty(shape, dtype=torch.int32)
    if num_tokens:
        route_kernel[(num_tokens,)](
            shares, chosen, scores.contiguous(), num_experts, TOP_K=spec.top_k,
            PLACES=triton.next_power_of_2(spec.top_k), RENORMALISE=spec.renormalise,
            BLOCK=triton.next_power_of_2(num_experts), num_warps=1,
        )  # fmt: skip
    return Routed(shares, chosen)


def cut_tiles(chosen: Tensor, num_experts: int, *, batch_invariant: bool) -> Tiles:
    """`chosen` [T, top_k]: each token's experts."""
    num_pairs = chosen.numel()
    is_few = num_pairs < FEW_PER_EXPERT * num_experts and not batch_invariant
    block_m = FEW_PER_EXPERT if is_few else MANY_PER_EXPERT
    # Each expert that is met at all leaves less than a tile empty.
    num_tiles = triton.cdiv(num_pairs, block_m) + min(num_experts, num_pairs)
    pairs = chosen.new_empty(num_tiles * block_m)
    experts = chosen.new_empty(num_tiles)
    if num_pairs:
        place_kernel[(num_experts,)](
            pairs, experts, chosen, num_pairs, num_tiles, BLOCK_M=block_m,
            BINS=triton.next_power_of_2(num_experts + 1), PIECE=PIECE, num_warps=4,
        )  # fmt: skip
    return Tiles(pairs, experts, block_m)


def combine(results: Tensor, shares: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of `results` [T, top_k, columns], each by its share."""
    num_tokens, top_k, num_columns = results.shape
    out = results.new_empty((num_tokens, num_columns), dtype=dtype)
    if num_tokens:
        combine_kernel[(num_tokens, triton.cdiv(num_columns, COLUMNS))](
            out, results, shares, num_columns, TOP_K=top_k,
            BLOCK=min(COLUMNS, triton.next_power_of_2(num_columns)), num_warps=4,
        )  # fmt: skip
    return out
