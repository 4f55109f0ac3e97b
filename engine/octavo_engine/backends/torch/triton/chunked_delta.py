"""The gated delta rule over prompts, in chunks that are a few matrix products each.

What a token adds to the state depends on what the tokens before it added: within a chunk that is a
triangular system, and its inverse depends on keys, gates and decays only. So one kernel inverts
these for all chunks at once, and a second one, with the state in registers, goes from chunk to
chunk by products alone. Chunks are cut from the step's tokens without regard to sequences, and the
second kernel takes parts of them, from where a sequence begins or a state was saved: of a
triangular matrix the inverse of a part is a part of the inverse.
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
    from octavo_engine.ops import DeltaSpec

CHUNK = 16  # with longer ones registers are spilled


class DeltaTile(NamedTuple):
    """How many columns of a state a program has, and the launch that suits it."""

    columns: int
    num_warps: int


TILE = DeltaTile(32, 4)
EXACT_TILE = DeltaTile(16, 8)  # no matrix units for exact float32: for checking, not for speed


# Numbers that change from step to step are not specialised.
@triton.jit(do_not_specialize=["num_tokens"])
def invert_kernel(
    inverses,  # [T, NUM_HEADS, CHUNK] f32: rows of a chunk's inverse
    qkv,
    qkv_stride,
    gates,
    gates_stride,
    a_log,
    dt_bias,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(1 + A)⁻¹ with A[t, i] = beta_t decay(i to t) k_t · k_i, of tokens i before t."""
    head = tl.program_id(1)
    places, dims = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    tokens = tl.program_id(0) * CHUNK + places
    live = tokens < num_tokens
    at = tokens.to(tl.int64)
    gate = gates + at * gates_stride + head
    beta = tl.load(gate, mask=live, other=0.0).to(tl.float32)
    beta = 1 / (1 + tl.exp(-beta))
    step = tl.load(gate + NUM_HEADS, mask=live, other=0.0).to(tl.float32)
    a, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    since = tl.cumsum(a * softplus(step + bias), 0)
    key = (NUM_KEYS + head // (NUM_HEADS // NUM_KEYS)) * KEY_DIM + dims
    mask = live[:, None] & (dims < KEY_DIM)[None, :]
    k = tl.load(qkv + at[:, None] * qkv_stride + key[None, :], mask=mask, other=0.0).to(tl.float32)
    k = k / tl.sqrt_rn(tl.sum(k * k, 1) + 1e-6)[:, None]
    is_before = places[:, None] < places[None, :]
    faded = tl.where(is_before, since[None, :] - since[:, None], 0.0)
    # Lines are the earlier tokens: what is needed next is a column.
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * tl.exp(faded) * beta[None, :]
    system = tl.where(is_before, system, 0.0)
    inverse = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for place in range(1, CHUNK):
        column = tl.sum(tl.where(places[None, :] == place, system, 0.0), 1)
        line = tl.sum(column[:, None] * inverse, 0)
        inverse = tl.where(places[:, None] == place, inverse - line[None, :], inverse)
    target = inverses + (at[:, None] * NUM_HEADS + head) * CHUNK + places[None, :]
    tl.store(target, inverse, mask=live[:, None] & (places >= 0)[None, :])


@triton.jit
def delta_chunk_kernel(
    out,  # [T, NUM_HEADS * DIM]
    qkv,  # rows of [q | k | v], qkv_stride apart
    qkv_stride,
    gates,  # [T, (beta | dt) of NUM_HEADS]
    gates_stride,
    inverses,
    memory,
    slot_stride,
    slots,
    saves,
    seq_starts,
    seq_lens,
    a_log,
    dt_bias,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns, dims = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    places = tl.arange(0, CHUNK)
    column_ok, dim_ok = columns < DIM, dims < KEY_DIM
    token, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    slot = tl.load(slots + sequence).to(tl.int64)
    own = head * DIM + columns
    mask = dim_ok[:, None] & column_ok[None, :]
    # Scalars that decide are limits here: Triton's interpreter spreads no scalar of one bit.
    num_read = tl.where(tl.load(seq_lens + sequence) > end - token, ROWS, 0)
    is_read = mask & (dims < tl.where(slot >= 0, num_read, 0))[:, None]
    cells = (head * KEY_DIM + dims[:, None]) * DIM + columns[None, :]
    state = tl.load(memory + slot * slot_stride + cells, mask=is_read, other=0.0)
    a, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    query = head // (NUM_HEADS // NUM_KEYS) * KEY_DIM
    while token < end:
        tokens = token + places
        saved = tl.load(saves + tokens, mask=tokens < end, other=-1)
        inner = token % CHUNK  # where in its chunk of the step the part begins
        count = tl.min(tl.where(saved >= 0, places + 1, CHUNK), 0)
        count = tl.minimum(tl.minimum(count, end - token), CHUNK - inner)
        live = places < tl.where(slot >= 0, count, 0)
        at = tokens.to(tl.int64)
        gate = gates + at * gates_stride + head
        beta = tl.load(gate, mask=live, other=0.0).to(tl.float32)
        beta = 1 / (1 + tl.exp(-beta))
        step = tl.load(gate + NUM_HEADS, mask=live, other=0.0).to(tl.float32)
        step = tl.where(live, a * softplus(step + bias), 0.0)
        since, whole = tl.cumsum(step, 0), tl.sum(step, 0)
        line = qkv + at[:, None] * qkv_stride
        key_mask = live[:, None] & dim_ok[None, :]
        k = tl.load(line + NUM_KEYS * KEY_DIM + query + dims[None, :], mask=key_mask, other=0.0)
        k = k.to(tl.float32)
        k = k / tl.sqrt_rn(tl.sum(k * k, 1) + 1e-6)[:, None]
        value_mask = live[:, None] & column_ok[None, :]
        v = tl.load(line + 2 * NUM_KEYS * KEY_DIM + own[None, :], mask=value_mask, other=0.0)
        missing = v.to(tl.float32)
        missing -= tl.dot(k, state, input_precision=PRECISION) * tl.exp(since)[:, None]
        missing *= beta[:, None]
        inverse = tl.load(
            inverses + (at[:, None] * NUM_HEADS + head) * CHUNK + inner + places[None, :],
            mask=live[:, None] & live[None, :], other=0.0,
        )  # fmt: skip
        added = tl.dot(inverse, missing, input_precision=PRECISION)
        q = tl.load(line + query + dims[None, :], mask=key_mask, other=0.0).to(tl.float32)
        q = q * (scale / tl.sqrt_rn(tl.sum(q * q, 1) + 1e-6))[:, None]
        is_before = places[:, None] >= places[None, :]
        faded = tl.where(is_before, since[:, None] - since[None, :], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * tl.exp(faded)
        scores = tl.where(is_before, scores, 0.0)
        y = tl.dot(q, state, input_precision=PRECISION) * tl.exp(since)[:, None]
        y += tl.dot(scores, added, input_precision=PRECISION)
        target = out + at[:, None] * (NUM_HEADS * DIM) + own[None, :]
        out_mask = (places < count)[:, None] & column_ok[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=out_mask)
        added *= tl.exp(whole - since)[:, None]
        state = state * tl.exp(whole) + tl.dot(tl.trans(k), added, input_precision=PRECISION)
        last = tl.max(tl.where(places == count - 1, saved, -1), 0).to(tl.int64)
        if (last >= 0) & (slot >= 0):
            tl.store(memory + last * slot_stride + cells, state, mask=mask)
        token += count
    if slot >= 0:
        tl.store(memory + slot * slot_stride + cells, state, mask=mask)


def delta_rule(
    qkv: Tensor, gates: Tensor, states: DeviceStates, step: DeviceStep, spec: DeltaSpec
) -> Tensor:
    assert step.states is not None
    num_tokens, heads = len(qkv), spec.num_value_heads
    num_columns = heads * spec.value_dim
    out = torch.empty((num_tokens, num_columns), dtype=qkv.dtype, device=qkv.device)
    shape = (num_tokens, heads, CHUNK)
    inverses = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    memory = states.layer(spec.layer)[:, spec.offset :]
    is_exact = qkv.dtype == torch.float32
    constants = {
        "NUM_HEADS": heads, "NUM_KEYS": spec.num_key_heads, "KEY_DIM": spec.key_dim,
        "ROWS": max(16, triton.next_power_of_2(spec.key_dim)), "CHUNK": CHUNK,
        "PRECISION": "ieee" if is_exact else "tf32",
    }  # fmt: skip
    slots, saves, _ = step.states
    invert_kernel[(triton.cdiv(num_tokens, CHUNK), heads)](
        inverses, qkv, qkv.stride(0), gates, gates.stride(0),
        spec.a_log, spec.dt_bias, num_tokens, **constants, num_warps=4,
    )  # fmt: skip
    tile = EXACT_TILE if is_exact else TILE
    block = max(16, min(tile.columns, triton.next_power_of_2(spec.value_dim)))
    delta_chunk_kernel[(len(slots), heads, triton.cdiv(spec.value_dim, block))](
        out, qkv, qkv.stride(0), gates, gates.stride(0), inverses, memory, memory.stride(0),
        slots, saves, step.seq_starts, step.seq_lens, spec.a_log, spec.dt_bias,
        spec.key_dim**-0.5, DIM=spec.value_dim, BLOCK=block, **constants, num_warps=tile.num_warps,
    )  # fmt: skip
    return out
