"""Scans token by token, with the state in registers: of single tokens, which is what decoding is,
and of prompts where results must not depend on how these are cut.

A program takes one sequence, one head and some columns of its state. It reads the state once,
leaves it where it was, and copies of it where the step says so. Sequences of padding have no slot:
their rows become zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_states import DeviceStates
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import SelectiveOperands
    from octavo_engine.ops import DeltaSpec, SelectiveSpec, SsdSpec

COLUMNS = 32  # of a head's state, of one program
SELECTIVE_COLUMNS = 64


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact where exp(x) is small beside 1, too."""
    e = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + e
    near = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def ssd_kernel(
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
    ROWS: tl.constexpr,  # STATE, up to a power of two
    BLOCK: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns, rows = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    column_ok, row_ok = columns < HEAD_DIM, rows < STATE
    first, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    begin, slot = first.to(tl.int64), tl.load(slots + sequence).to(tl.int64)
    own = head * HEAD_DIM + columns
    if slot >= 0:
        mask = row_ok[:, None] & column_ok[None, :]
        num_read = tl.where(tl.load(seq_lens + sequence) > end - first, ROWS, 0)
        is_read = mask & (rows < num_read)[:, None]
        places = (head * STATE + rows[:, None]) * HEAD_DIM + columns[None, :]
        state = tl.load(memory + slot * slot_stride + places, mask=is_read, other=0.0)
        a = -tl.exp(tl.load(a_log + head))
        skip, bias = tl.load(d + head), tl.load(dt_bias + head)
        group = head // (NUM_HEADS // NUM_GROUPS) * STATE + NUM_HEADS * HEAD_DIM
        for number in range(end - first):
            at = begin + number
            row = xbc + at * xbc_stride
            step = tl.load(dt + at * dt_stride + head).to(tl.float32)
            step = tl.minimum(tl.maximum(softplus(step + bias), dt_min), dt_max)
            x = tl.load(row + own, mask=column_ok, other=0.0).to(tl.float32)
            b = tl.load(row + group + rows, mask=row_ok, other=0.0).to(tl.float32)
            c = tl.load(row + group + NUM_GROUPS * STATE + rows, mask=row_ok, other=0.0).to(
                tl.float32
            )
            state = state * tl.exp(a * step) + (step * b)[:, None] * x[None, :]
            y = tl.sum(state * c[:, None], 0) + skip * x
            target = out + at * (NUM_HEADS * HEAD_DIM) + own
            tl.store(target, y.to(out.dtype.element_ty), mask=column_ok)
            saved = tl.load(saves + at).to(tl.int64)
            if saved >= 0:
                tl.store(memory + saved * slot_stride + places, state, mask=mask)
        tl.store(memory + slot * slot_stride + places, state, mask=mask)
    else:
        for number in range(end - first):
            target = out + (begin + number) * (NUM_HEADS * HEAD_DIM) + own
            tl.store(target, tl.zeros([BLOCK], out.dtype.element_ty), mask=column_ok)


@triton.jit
def selective_kernel(
    out,  # [T, width]
    x,  # [T, width], rows x_stride apart
    x_stride,
    dt,
    dt_stride,
    b,  # [T, STATE]
    b_stride,
    c,
    c_stride,
    memory,
    slot_stride,
    slots,
    saves,
    seq_starts,
    seq_lens,
    a_log,  # [width, STATE] f32
    d,
    dt_bias,
    width,
    STATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    columns, rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    column_ok, row_ok = columns < width, rows < STATE
    first, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    begin, slot = first.to(tl.int64), tl.load(slots + sequence).to(tl.int64)
    if slot >= 0:
        mask = row_ok[:, None] & column_ok[None, :]
        num_read = tl.where(tl.load(seq_lens + sequence) > end - first, ROWS, 0)
        is_read = mask & (rows < num_read)[:, None]
        places = rows[:, None] * width + columns[None, :]
        state = tl.load(memory + slot * slot_stride + places, mask=is_read, other=0.0)
        a = -tl.exp(tl.load(a_log + columns[None, :] * STATE + rows[:, None], mask=mask, other=0.0))
        skip = tl.load(d + columns, mask=column_ok, other=0.0)
        bias = tl.load(dt_bias + columns, mask=column_ok, other=0.0)
        for number in range(end - first):
            at = begin + number
            step = tl.load(dt + at * dt_stride + columns, mask=column_ok, other=0.0).to(tl.float32)
            step = softplus(step + bias)
            value = tl.load(x + at * x_stride + columns, mask=column_ok, other=0.0).to(tl.float32)
            taken = tl.load(b + at * b_stride + rows, mask=row_ok, other=0.0).to(tl.float32)
            given = tl.load(c + at * c_stride + rows, mask=row_ok, other=0.0).to(tl.float32)
            state = state * tl.exp(a * step[None, :]) + taken[:, None] * (step * value)[None, :]
            y = tl.sum(state * given[:, None], 0) + skip * value
            tl.store(out + at * width + columns, y.to(out.dtype.element_ty), mask=column_ok)
            saved = tl.load(saves + at).to(tl.int64)
            if saved >= 0:
                tl.store(memory + saved * slot_stride + places, state, mask=mask)
        tl.store(memory + slot * slot_stride + places, state, mask=mask)
    else:
        for number in range(end - first):
            target = out + (begin + number) * width + columns
            tl.store(target, tl.zeros([BLOCK], out.dtype.element_ty), mask=column_ok)


@triton.jit
def delta_kernel(
    out,  # [T, NUM_HEADS * DIM]
    qkv,  # rows of [q | k | v], qkv_stride apart
    qkv_stride,
    gates,  # [T, (beta | dt) of NUM_HEADS]
    gates_stride,
    memory,
    slot_stride,
    slots,
    saves,
    seq_starts,
    seq_lens,
    a_log,  # [NUM_HEADS] f32, both
    dt_bias,
    scale,  # of queries
    NUM_HEADS: tl.constexpr,  # of values
    NUM_KEYS: tl.constexpr,  # heads of queries and keys
    KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    columns, rows = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    column_ok, row_ok = columns < DIM, rows < KEY_DIM
    first, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    begin, slot = first.to(tl.int64), tl.load(slots + sequence).to(tl.int64)
    own = head * DIM + columns
    if slot >= 0:
        mask = row_ok[:, None] & column_ok[None, :]
        num_read = tl.where(tl.load(seq_lens + sequence) > end - first, ROWS, 0)
        is_read = mask & (rows < num_read)[:, None]
        places = (head * KEY_DIM + rows[:, None]) * DIM + columns[None, :]
        state = tl.load(memory + slot * slot_stride + places, mask=is_read, other=0.0)
        a, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
        key = head // (NUM_HEADS // NUM_KEYS) * KEY_DIM + rows
        for number in range(end - first):
            at = begin + number
            row = qkv + at * qkv_stride
            gate = gates + at * gates_stride + head
            beta = 1 / (1 + tl.exp(-tl.load(gate).to(tl.float32)))
            decay = tl.exp(a * softplus(tl.load(gate + NUM_HEADS).to(tl.float32) + bias))
            q = tl.load(row + key, mask=row_ok, other=0.0).to(tl.float32)
            k = tl.load(row + NUM_KEYS * KEY_DIM + key, mask=row_ok, other=0.0).to(tl.float32)
            v = tl.load(row + 2 * NUM_KEYS * KEY_DIM + own, mask=column_ok, other=0.0)
            q = q * (scale / tl.sqrt_rn(tl.sum(q * q, 0) + 1e-6))
            k = k / tl.sqrt_rn(tl.sum(k * k, 0) + 1e-6)
            state = state * decay
            missing = (v.to(tl.float32) - tl.sum(state * k[:, None], 0)) * beta
            state += k[:, None] * missing[None, :]
            y = tl.sum(state * q[:, None], 0)
            target = out + at * (NUM_HEADS * DIM) + own
            tl.store(target, y.to(out.dtype.element_ty), mask=column_ok)
            saved = tl.load(saves + at).to(tl.int64)
            if saved >= 0:
                tl.store(memory + saved * slot_stride + places, state, mask=mask)
        tl.store(memory + slot * slot_stride + places, state, mask=mask)
    else:
        for number in range(end - first):
            target = out + (begin + number) * (NUM_HEADS * DIM) + own
            tl.store(target, tl.zeros([BLOCK], out.dtype.element_ty), mask=column_ok)


def ssd_scan(
    xbc: Tensor, dt: Tensor, states: DeviceStates, step: DeviceStep, spec: SsdSpec
) -> Tensor:
    assert step.states is not None
    out = _empty(xbc, spec.num_heads * spec.head_dim)
    memory = states.layer(spec.layer)[:, spec.offset :]
    block = min(COLUMNS, triton.next_power_of_2(spec.head_dim))
    grid = (len(step.seq_lens), spec.num_heads, triton.cdiv(spec.head_dim, block))
    ssd_kernel[grid](
        out, xbc, xbc.stride(0), dt, dt.stride(0), memory, memory.stride(0),
        step.states.slots, step.states.saves, step.seq_starts, step.seq_lens,
        spec.a_log, spec.d, spec.dt_bias, spec.dt_min, spec.dt_max,
        NUM_HEADS=spec.num_heads, HEAD_DIM=spec.head_dim, NUM_GROUPS=spec.num_groups,
        STATE=spec.state_size, ROWS=triton.next_power_of_2(spec.state_size), BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def selective_scan(
    operands: SelectiveOperands, states: DeviceStates, step: DeviceStep, spec: SelectiveSpec
) -> Tensor:
    x, dt, b, c = operands
    assert step.states is not None
    out = _empty(x, spec.width)
    memory = states.layer(spec.layer)[:, spec.offset :]
    grid = (len(step.seq_lens), triton.cdiv(spec.width, SELECTIVE_COLUMNS))
    selective_kernel[grid](
        out, x, x.stride(0), dt, dt.stride(0), b, b.stride(0), c, c.stride(0),
        memory, memory.stride(0), step.states.slots, step.states.saves,
        step.seq_starts, step.seq_lens, spec.a_log, spec.d, spec.dt_bias, spec.width,
        STATE=spec.state_size, ROWS=triton.next_power_of_2(spec.state_size),
        BLOCK=SELECTIVE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def delta_rule(
    qkv: Tensor, gates: Tensor, states: DeviceStates, step: DeviceStep, spec: DeltaSpec
) -> Tensor:
    assert step.states is not None
    out = _empty(qkv, spec.num_value_heads * spec.value_dim)
    memory = states.layer(spec.layer)[:, spec.offset :]
    block = min(COLUMNS, triton.next_power_of_2(spec.value_dim))
    grid = (len(step.seq_lens), spec.num_value_heads, triton.cdiv(spec.value_dim, block))
    delta_kernel[grid](
        out, qkv, qkv.stride(0), gates, gates.stride(0), memory, memory.stride(0),
        step.states.slots, step.states.saves, step.seq_starts, step.seq_lens,
        spec.a_log, spec.dt_bias, spec.key_dim**-0.5,
        NUM_HEADS=spec.num_value_heads, NUM_KEYS=spec.num_key_heads, KEY_DIM=spec.key_dim,
        DIM=spec.value_dim, ROWS=triton.next_power_of_2(spec.key_dim), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _empty(like: Tensor, num_columns: int) -> Tensor:
    return torch.empty((len(like), num_columns), dtype=like.dtype, device=like.device)
