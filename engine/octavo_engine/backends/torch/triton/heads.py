"""What happens to q, k and v before attention: head norms, rope, the write to the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.e4m3 import round_to_e4m3

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import LayerKV
    from octavo_engine.ops import AttentionSpec


HEADS_PER_PROGRAM = 8


@triton.jit
def row_scales(x):
    """As `kv_format.narrow_rows`, of float32 rows: bf16 numbers, still in float32."""
    largest = tl.max(tl.abs(tl.where(x == x, x, 0.0)), 1)
    scales = tl.div_rn(largest, 448.0) + tl.sum(x * 0.0, 1)
    bits = (scales.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    rounded = tl.where(scales == scales, bits.to(tl.float32, bitcast=True), scales)
    return tl.where(scales < 7.888609052210118e-31, 0.0, rounded)  # 2^-100


@triton.jit
def turn_and_store_kernel(
    q_out,  # [T, num_heads * HEAD_DIM]
    k_cache,  # [blocks, PAGE, kv heads, HEAD_DIM]
    v_cache,
    qkv,  # [T, (num_heads + 2 * num_kv_heads) * HEAD_DIM]
    cos_sin,  # [positions, 2 * HALF]: cosines, then sines
    positions,
    slots,  # -1: a row of padding, nothing is written
    q_norm,
    k_norm,
    k_scales,  # [blocks, kv heads, PAGE] bf16, if HAS_SCALES
    v_scales,
    eps,
    warmth,  # of queries, if WARMS: as ops.QueryTemperature
    warmth_floor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # pairs that turn; 0: no rope
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    NORMS_LAST: tl.constexpr,  # after the turn
    WARMS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # keys and values are stored in e4m3
):
    """HEADS heads of one token, all of q, of k or of v alike; a head is read once."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    TOTAL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    is_q = heads < NUM_HEADS
    is_k = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_v = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < TOTAL)
    dims = tl.arange(0, DIM)
    mask = (heads < TOTAL)[:, None] & (dims < HEAD_DIM)[None, :]
    source = qkv + (token * TOTAL + heads)[:, None] * HEAD_DIM
    x = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)

    # The partner of column i within its pair, for the turn below.
    partners = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    y = x
    if HALF > 0:
        y = tl.load(source + partners[None, :], mask=mask, other=0.0).to(tl.float32)
    if (HAS_Q_NORM or HAS_K_NORM) and not NORMS_LAST:
        factor = 1 / tl.sqrt_rn(tl.sum(x * x, 1) / HEAD_DIM + eps)
        dim_ok = dims < HEAD_DIM
        own = tl.full([HEADS, DIM], 1.0, tl.float32)
        other = own
        if HAS_Q_NORM:
            weight = tl.load(q_norm + dims, mask=dim_ok, other=0.0)[None, :] * factor[:, None]
            own = tl.where(is_q[:, None], weight, own)
            weight = tl.load(q_norm + partners, mask=dim_ok, other=0.0)[None, :] * factor[:, None]
            other = tl.where(is_q[:, None], weight, other)
        if HAS_K_NORM:
            weight = tl.load(k_norm + dims, mask=dim_ok, other=0.0)[None, :] * factor[:, None]
            own = tl.where(is_k[:, None], weight, own)
            weight = tl.load(k_norm + partners, mask=dim_ok, other=0.0)[None, :] * factor[:, None]
            other = tl.where(is_k[:, None], weight, other)
        x, y = x * own, y * other
    if HALF > 0:
        angles = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
        turns = dims < 2 * HALF
        pair = tl.where(dims < HALF, dims, dims - HALF)
        cos = tl.load(angles + pair, mask=turns, other=1.0)
        sin = tl.load(angles + HALF + pair, mask=turns, other=0.0)
        sin = tl.where(dims < HALF, -sin, sin)
        x = tl.where(is_v[:, None], x, x * cos[None, :] + y * sin[None, :])
    if (HAS_Q_NORM or HAS_K_NORM) and NORMS_LAST:
        factor = 1 / tl.sqrt_rn(tl.sum(x * x, 1) / HEAD_DIM + eps)
        own = tl.full([HEADS, DIM], 1.0, tl.float32)
        if HAS_Q_NORM:
            weight = tl.load(q_norm + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
            own = tl.where(is_q[:, None], weight * factor[:, None], own)
        if HAS_K_NORM:
            weight = tl.load(k_norm + dims, mask=dims < HEAD_DIM, other=0.0)[None, :]
            own = tl.where(is_k[:, None], weight * factor[:, None], own)
        x = x * own
    if WARMS:
        place = (tl.load(positions + token) + 1).to(tl.float32)
        warm = 1 + warmth * tl.log(1 + tl.floor(tl.div_rn(place, warmth_floor)))
        x = tl.where(is_q[:, None], x * warm, x)

    target = q_out + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, x.to(q_out.dtype.element_ty), mask=mask & is_q[:, None])
    # One slot for all heads, as a block: not every interpreter masks by a scalar.
    slot = tl.load(slots + token + tl.zeros_like(heads)).to(tl.int64)
    kept = mask & (slot >= 0)[:, None]
    if HAS_SCALES:
        scales = row_scales(x)
        ones = tl.full([HEADS], 1.0, tl.float32)
        factors = tl.div_rn(ones, tl.where(scales == 0.0, 1.0, scales))
        factors = tl.where(scales == 0.0, 0.0, factors)
        x = round_to_e4m3(x * factors[:, None])
        at = (slot // PAGE * NUM_KV_HEADS + heads - NUM_HEADS) * PAGE + slot % PAGE
        narrowed = scales.to(tl.bfloat16)
        tl.store(k_scales + at, narrowed, mask=(slot >= 0) & is_k)
        tl.store(v_scales + at - NUM_KV_HEADS * PAGE, narrowed, mask=(slot >= 0) & is_v)
    values = x.to(k_cache.dtype.element_ty)
    place = slot * NUM_KV_HEADS + heads - NUM_HEADS
    target = k_cache + place[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, values, mask=kept & is_k[:, None])
    target = v_cache + (place - NUM_KV_HEADS)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, values, mask=kept & is_v[:, None])


def turn_and_store(
    qkv: Tensor,
    cos_sin: Tensor | None,
    kv: LayerKV,
    step: DeviceStep,
    spec: AttentionSpec,
) -> Tensor:
    """q, normed and turned, [T, num_heads * head_dim]; k and v are in the cache afterwards."""
    k_cache, v_cache, scales = kv
    num_tokens = len(qkv)
    q = qkv.new_empty((num_tokens, spec.num_heads * spec.head_dim))
    if num_tokens == 0:
        return q
    total = spec.num_heads + 2 * spec.num_kv_heads
    warmth = spec.temperature
    turn_and_store_kernel[(num_tokens, triton.cdiv(total, HEADS_PER_PROGRAM))](
        q, k_cache, v_cache, qkv,
        qkv if cos_sin is None else cos_sin,
        step.positions, step.slots,
        qkv if spec.q_norm is None else spec.q_norm,
        qkv if spec.k_norm is None else spec.k_norm,
        *(scales or (qkv, qkv)),
        spec.norm_eps,
        0.0 if warmth is None else warmth.scale, 1.0 if warmth is None else warmth.floor,
        NUM_HEADS=spec.num_heads, NUM_KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim, DIM=triton.next_power_of_2(spec.head_dim),
        HALF=0 if cos_sin is None else cos_sin.shape[1] // 2,
        HAS_Q_NORM=spec.q_norm is not None, HAS_K_NORM=spec.k_norm is not None,
        NORMS_LAST=spec.norm_after_rope, WARMS=warmth is not None,
        HEADS=HEADS_PER_PROGRAM, PAGE=k_cache.shape[1], HAS_SCALES=scales is not None, num_warps=4,
    )  # fmt: skip
    return q
