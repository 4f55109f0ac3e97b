"""Which experts a token's row goes to, and back: three launches around a mixture's products.

  route    each token's best experts and their weights
  place    each expert's pairs of token and expert, in tiles of its own
  combine  a token's results, in the order of its own scores: the same sum in any company

Where weights multiply what experts take, a fourth one, `weigh`, makes a row for each pair.

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

    weights: Tensor  # float32 [T, top_k]
    chosen: Tensor  # int32 [T, top_k]


class Tiles(NamedTuple):
    """Pairs of token and expert sorted by expert, each expert's padded to whole tiles."""

    pairs: Tensor  # int32 [tiles * block_m]: token * top_k + place; -1 is padding
    experts: Tensor  # int32 [tiles]: -1 is none, and then `pairs` says nothing
    block_m: int


@triton.jit
def route_kernel(
    weights,  # [T, TOP_K] f32
    chosen,  # [T, TOP_K] i32
    scores,  # [T, experts]
    bias,  # [experts] f32, if HAS_BIAS: counts in the choice, not in the weight
    num_experts,
    scale,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,  # NUM_GROUPS, up to a power of two
    BLOCK: tl.constexpr,
):
    """One token. Of equals the first expert, or group, is taken."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    is_there = experts < num_experts
    x = tl.load(scores + token * num_experts + experts, mask=is_there, other=-float("inf"))
    x = x.to(tl.float32)
    # What is no number chooses all the same, and makes its token's result none either.
    is_flawed = (x != x) | (x == float("inf"))
    x = tl.where(is_flawed, 0.0, x)
    if IS_SIGMOID:
        shares = 1 / (1 + tl.exp(tl.minimum(-x, 80.0)))
    else:
        powers = tl.exp(x - tl.max(x, 0))
        shares = powers / tl.sum(powers, 0)
    left = shares
    if HAS_BIAS:
        left += tl.load(bias + experts, mask=is_there, other=0.0)
    left = tl.where(is_there, left, -float("inf"))
    if TOP_GROUPS < NUM_GROUPS:
        group_of = experts // (num_experts // NUM_GROUPS)
        best_of = rate_groups(left, group_of, NUM_GROUPS, BEST_OF_GROUP, GROUPS, BLOCK)
        groups = tl.arange(0, GROUPS)
        is_open = experts < 0
        for _ in range(TOP_GROUPS):
            best = tl.min(tl.where(best_of == tl.max(best_of, 0), groups, GROUPS), 0)
            is_open = is_open | (group_of == best)
            best_of = tl.where(groups == best, -float("inf"), best_of)
        left = tl.where(is_open, left, -float("inf"))
    places = tl.arange(0, PLACES)
    own_weights = tl.zeros([PLACES], tl.float32)
    own_chosen = tl.zeros([PLACES], tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), experts, BLOCK), 0)
        is_best = experts == best
        share = tl.sum(tl.where(is_best, shares, 0.0), 0)
        own_weights = tl.where(places == place, share, own_weights)
        own_chosen = tl.where(places == place, best, own_chosen)
        left = tl.where(is_best, -float("inf"), left)
    if RENORMALISE:
        own_weights = own_weights / (tl.sum(own_weights, 0) + 1e-20)
    own_weights = own_weights * scale
    if tl.max(is_flawed.to(tl.int32), 0) > 0:
        own_weights = tl.full([PLACES], float("nan"), tl.float32)
    tl.store(weights + token * TOP_K + places, own_weights, mask=places < TOP_K)
    tl.store(chosen + token * TOP_K + places, own_chosen, mask=places < TOP_K)


@triton.jit
def rate_groups(
    choice,  # [BLOCK]: what each expert is chosen by; -inf beyond the last
    group_of,
    NUM_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[GROUPS]: the sum of each group's best experts; -inf beyond the last group."""
    experts, groups = tl.arange(0, BLOCK), tl.arange(0, GROUPS)
    best_of = tl.full([GROUPS], -float("inf"), tl.float32)
    for group in range(NUM_GROUPS):
        own = tl.where(group_of == group, choice, -float("inf"))
        total = tl.max(own, 0)
        for _ in tl.static_range(BEST_OF_GROUP - 1):
            best = tl.min(tl.where(own == tl.max(own, 0), experts, BLOCK), 0)
            own = tl.where(experts == best, -float("inf"), own)
            total += tl.max(own, 0)
        best_of = tl.where(groups == group, total, best_of)
    return best_of


@triton.jit
def weigh_kernel(
    out,  # [T, TOP_K, columns]
    x,  # [T, columns]
    weights,  # [T, TOP_K] f32
    num_columns,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    values = tl.load(x + pair // TOP_K * num_columns + columns, mask=mask, other=0.0)
    values = values.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + pair * num_columns + columns, values.to(out.dtype.element_ty), mask=mask)


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
    weights,  # [T, TOP_K] f32
    num_columns,
    TOP_K: tl.constexpr,
    IS_WEIGHED: tl.constexpr,  # what experts took was
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        result = tl.load(results + pair * num_columns + columns, mask=mask, other=0.0)
        if IS_WEIGHED:
            total += result.to(tl.float32)
        else:
            total += tl.load(weights + pair) * result.to(tl.float32)
    tl.store(out + token * num_columns + columns, total.to(out.dtype.element_ty), mask=mask)


def route(scores: Tensor, spec: ExpertsSpec) -> Routed:
    """As `plain.choose_experts`."""
    num_tokens, num_experts = scores.shape
    shape = (num_tokens, spec.top_k)
    weights = scores.new_empty(shape, dtype=torch.float32)
    chosen = scores.new_empty(shape, dtype=torch.int32)
    if num_tokens:
        route_kernel[(num_tokens,)](
            weights, chosen, scores.contiguous(), scores if spec.bias is None else spec.bias,
            num_experts, spec.scale, TOP_K=spec.top_k,
            PLACES=triton.next_power_of_2(spec.top_k), RENORMALISE=spec.renormalise,
            IS_SIGMOID=spec.is_sigmoid, HAS_BIAS=spec.bias is not None,
            NUM_GROUPS=spec.num_groups, TOP_GROUPS=spec.top_groups,
            BEST_OF_GROUP=min(spec.best_of_group, num_experts // spec.num_groups),
            GROUPS=triton.next_power_of_2(spec.num_groups),
            BLOCK=triton.next_power_of_2(num_experts), num_warps=1,
        )  # fmt: skip
    return Routed(weights, chosen)


def weigh(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, columns] times each of its weights [T, top_k]: a row for each pair."""
    (num_tokens, top_k), num_columns = weights.shape, x.shape[1]
    out = x.new_empty((num_tokens * top_k, num_columns))
    if num_tokens:
        weigh_kernel[(num_tokens * top_k, triton.cdiv(num_columns, COLUMNS))](
            out, x, weights, num_columns, TOP_K=top_k,
            BLOCK=min(COLUMNS, triton.next_power_of_2(num_columns)), num_warps=4,
        )  # fmt: skip
    return out


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


def combine(
    results: Tensor, weights: Tensor, dtype: torch.dtype, *, is_weighed: bool = False
) -> Tensor:
    """Sums of `results` [T, top_k, columns], each by its weight unless what experts took was."""
    num_tokens, top_k, num_columns = results.shape
    out = results.new_empty((num_tokens, num_columns), dtype=dtype)
    if num_tokens:
        combine_kernel[(num_tokens, triton.cdiv(num_columns, COLUMNS))](
            out, results, weights, num_columns, TOP_K=top_k, IS_WEIGHED=is_weighed,
            BLOCK=min(COLUMNS, triton.next_power_of_2(num_columns)), num_warps=4,
        )  # fmt: skip
    return out
