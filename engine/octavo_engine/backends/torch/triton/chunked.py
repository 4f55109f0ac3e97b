"""Mamba 2's scan over prompts: tokens in chunks, each of which is a few matrix products.

Within a chunk a token's result is a sum over the tokens before it, weighed by how much of them has
decayed since, and over the state that the chunk began with. Only that state goes on from chunk to
chunk, in registers. Chunks end where a state is to be saved, so all other places are free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.triton.state_scans import softplus

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_states import DeviceStates
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.ops import SsdSpec


class ChunkTile(NamedTuple):
    """How many tokens and columns a program takes at once."""

    tokens: int
    columns: int


# The largest whose state, operands and products fit into registers.
TILE = ChunkTile(32, 32)
EXACT_TILE = ChunkTile(16, 16)  # no matrix units for exact float32: for checking, not for speed
NUM_WARPS = 8


@triton.jit
def ssd_chunk_kernel(
    out,  # [T, NUM_HEADS * HEAD_DIM]
    xbc,  # rows of [x | B | C], xbc_stride apart
    xbc_stride,
    dt,  # [T, NUM_HEADS], rows dt_stride apart
    dt_stride,
    memory,  # f32: of the layer's scan; slots lie slot_stride apart
    slot_stride,
    slots,
    saves,
    seq_starts,
    seq_lens,
    a_log,  # [NUM_HEADS] f32, these three
    d,
    dt_bias,
    dt_min,
    dt_max,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,  # of products with a factor in float32
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns, rows = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    places = tl.arange(0, CHUNK)
    column_ok, row_ok = columns < HEAD_DIM, rows < STATE
    token, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    slot = tl.load(slots + sequence).to(tl.int64)
    own = head * HEAD_DIM + columns
    mask = row_ok[:, None] & column_ok[None, :]
    # Scalars that decide are limits here: Triton's interpreter spreads no scalar of one bit.
    num_read = tl.where(tl.load(seq_lens + sequence) > end - token, ROWS, 0)
    is_read = mask & (rows < tl.where(slot >= 0, num_read, 0))[:, None]
    cells = (head * STATE + rows[:, None]) * HEAD_DIM + columns[None, :]
    state = tl.load(memory + slot * slot_stride + cells, mask=is_read, other=0.0)
    a = -tl.exp(tl.load(a_log + head))
    skip, bias = tl.load(d + head), tl.load(dt_bias + head)
    group = head // (NUM_HEADS // NUM_GROUPS) * STATE + NUM_HEADS * HEAD_DIM
    while token < end:
        tokens = token + places
        saved = tl.load(saves + tokens, mask=tokens < end, other=-1)
        count = tl.min(tl.where(saved >= 0, places + 1, CHUNK), 0)
        count = tl.minimum(count, end - token)
        live = places < tl.where(slot >= 0, count, 0)
        at = tokens.to(tl.int64)
        step = tl.load(dt + at * dt_stride + head, mask=live, other=0.0).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(step + bias), dt_min), dt_max)
        step = tl.where(live, step, 0.0)
        since = tl.cumsum(a * step, 0)  # logarithms of what is left of the state at the beginning
        whole = tl.sum(a * step, 0)
        line = xbc + at[:, None] * xbc_stride
        xs = tl.load(line + own[None, :], mask=live[:, None] & column_ok[None, :], other=0.0)
        row_mask = live[:, None] & row_ok[None, :]
        b = tl.load(line + group + rows[None, :], mask=row_mask, other=0.0)
        c = tl.load(line + group + NUM_GROUPS * STATE + rows[None, :], mask=row_mask, other=0.0)
        x = xs.to(tl.float32)
        is_before = places[:, None] >= places[None, :]
        faded = tl.where(is_before, since[:, None] - since[None, :], 0.0)
        weights = tl.where(is_before, tl.exp(faded) * step[None, :], 0.0)
        weights *= tl.dot(c, tl.trans(b), input_precision=PRECISION)
        y = tl.dot(c.to(tl.float32), state, input_precision=PRECISION) * tl.exp(since)[:, None]
        y += tl.dot(weights, x, input_precision=PRECISION) + skip * x
        target = out + at[:, None] * (NUM_HEADS * HEAD_DIM) + own[None, :]
        out_mask = (places < count)[:, None] & column_ok[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=out_mask)
        left = x * (tl.exp(whole - since) * step)[:, None]
        state = state * tl.exp(whole)
        state += tl.dot(tl.trans(b).to(tl.float32), left, input_precision=PRECISION)
        last = tl.max(tl.where(places == count - 1, saved, -1), 0).to(tl.int64)
        if (last >= 0) & (slot >= 0):
            tl.store(memory + last * slot_stride + cells, state, mask=mask)
        token += count
    if slot >= 0:
        tl.store(memory + slot * slot_stride + cells, state, mask=mask)


def ssd_scan(
    xbc: Tensor, dt: Tensor, states: DeviceStates, step: DeviceStep, spec: SsdSpec
) -> Tensor:
    assert step.states is not None
    num_columns = spec.num_heads * spec.head_dim
    out = torch.empty((len(xbc), num_columns), dtype=xbc.dtype, device=xbc.device)
    memory = states.layer(spec.layer)[:, spec.offset :]
    is_exact = xbc.dtype == torch.float32
    tile = EXACT_TILE if is_exact else TILE
    block = max(16, min(tile.columns, triton.next_power_of_2(spec.head_dim)))
    grid = (len(step.seq_lens), spec.num_heads, triton.cdiv(spec.head_dim, block))
    ssd_chunk_kernel[grid](
        out, xbc, xbc.stride(0), dt, dt.stride(0), memory, memory.stride(0),
        step.states.slots, step.states.saves, step.seq_starts, step.seq_lens,
        spec.a_log, spec.d, spec.dt_bias, spec.dt_min, spec.dt_max,
        NUM_HEADS=spec.num_heads, HEAD_DIM=spec.head_dim, NUM_GROUPS=spec.num_groups,
        STATE=spec.state_size, ROWS=max(16, triton.next_power_of_2(spec.state_size)), BLOCK=block,
        CHUNK=tile.tokens, PRECISION="ieee" if is_exact else "tf32", num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
