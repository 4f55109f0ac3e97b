"""Causal convolutions over each column's last inputs, of which a state keeps those before the step.

Of single tokens one kernel reads the state, computes and shifts it. Of prompts a program computes
one token from the inputs before it, wherever these are, and a second kernel leaves the last ones.
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
    from octavo_engine.ops import ConvSpec

COLUMNS = 256


@triton.jit
def conv_step_kernel(
    out,  # [S, columns]
    x,  # [S, columns], rows x_stride apart
    x_stride,
    weight,  # [columns, KERNEL] f32
    bias,
    memory,  # f32: of the layer; slots lie slot_stride apart
    slot_stride,
    slots,
    saves,
    seq_lens,
    num_columns,
    KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token of each sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    slot = tl.load(slots + sequence).to(tl.int64)
    saved = tl.load(saves + sequence).to(tl.int64)
    # Scalars that decide are limits here: Triton's interpreter spreads no scalar of one bit.
    num_kept = tl.where(slot >= 0, num_columns, 0)
    has_state = columns < num_kept
    is_saved = columns < tl.where(saved >= 0, num_kept, 0)
    is_read = columns < tl.where(tl.load(seq_lens + sequence) > 1, num_kept, 0)
    state = memory + slot * slot_stride + columns
    copy = memory + saved * slot_stride + columns
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(KERNEL):
        if place < KERNEL - 1:
            value = tl.load(state + place * num_columns, mask=is_read, other=0.0)
        else:
            value = tl.load(x + sequence * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if place > 0:  # a row that all threads have read
            tl.debug_barrier()
            tl.store(state + (place - 1) * num_columns, value, mask=has_state)
            tl.store(copy + (place - 1) * num_columns, value, mask=is_saved)
        total += value * tl.load(weight + columns * KERNEL + place, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0)
    if IS_SILU:
        total = total / (1 + tl.exp(tl.minimum(-total, 80.0)))
    tl.store(out + sequence * num_columns + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def conv_kernel(
    out,
    x,
    x_stride,
    weight,
    bias,
    memory,
    slot_stride,
    slots,
    saves,
    token_seqs,
    seq_starts,
    seq_lens,
    num_columns,
    KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token; states are read, and written where the token's own is saved."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    sequence = tl.load(token_seqs + token)
    first, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    slot = tl.load(slots + sequence).to(tl.int64)
    saved = tl.load(saves + token).to(tl.int64)
    num_kept = tl.where(slot >= 0, num_columns, 0)
    num_read = tl.where(tl.load(seq_lens + sequence) > end - first, num_kept, 0)
    is_saved = columns < tl.where(saved >= 0, num_kept, 0)
    state = memory + slot * slot_stride + columns
    copy = memory + saved * slot_stride + columns
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(KERNEL):
        source = token - (KERNEL - 1) + place
        row = source - first + (KERNEL - 1)
        is_new = columns < tl.where(source >= first, num_columns, 0)
        is_old = columns < tl.where(source < first, num_read, 0)
        value = tl.load(x + source * x_stride + columns, mask=is_new, other=0.0).to(tl.float32)
        value += tl.load(state + row * num_columns, mask=is_old, other=0.0)
        if place > 0:
            tl.store(copy + (place - 1) * num_columns, value, mask=is_saved)
        total += value * tl.load(weight + columns * KERNEL + place, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0)
    if IS_SILU:
        total = total / (1 + tl.exp(tl.minimum(-total, 80.0)))
    tl.store(out + token * num_columns + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def conv_state_kernel(
    x,
    x_stride,
    memory,
    slot_stride,
    slots,
    seq_starts,
    seq_lens,
    num_columns,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last inputs of a sequence, of which the oldest may be the state's own."""
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(seq_starts + sequence), tl.load(seq_starts + sequence + 1)
    count = end - first
    slot = tl.load(slots + sequence).to(tl.int64)
    num_kept = tl.where(slot >= 0, num_columns, 0)
    num_kept = tl.where(count > 0, num_kept, 0)
    num_read = tl.where(tl.load(seq_lens + sequence) > count, num_kept, 0)
    state = memory + slot * slot_stride + columns
    for place in tl.static_range(KERNEL - 1):
        source = count - (KERNEL - 1) + place  # among the step's tokens
        is_new = columns < tl.where(source >= 0, num_kept, 0)
        is_old = columns < tl.where(source < 0, num_read, 0)
        new = x + (first + source).to(tl.int64) * x_stride + columns
        value = tl.load(new, mask=is_new, other=0.0).to(tl.float32)
        # A later row than those written so far.
        value += tl.load(state + (source + KERNEL - 1) * num_columns, mask=is_old, other=0.0)
        tl.debug_barrier()  # of all threads, before the row is written
        tl.store(state + place * num_columns, value, mask=columns < num_kept)


def short_conv(
    x: Tensor, states: DeviceStates, step: DeviceStep, spec: ConvSpec, *, one_kernel: bool
) -> Tensor:
    """`one_kernel`: single tokens are computed as those of prompts are."""
    assert step.states is not None
    num_rows, num_columns = x.shape
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    memory = states.layer(spec.layer)
    blocks = triton.cdiv(num_columns, COLUMNS)
    bias = spec.weight if spec.bias is None else spec.bias
    constants = {
        "KERNEL": spec.kernel, "HAS_BIAS": spec.bias is not None,
        "IS_SILU": spec.activation == "silu", "BLOCK": COLUMNS, "num_warps": 4,
    }  # fmt: skip
    slots, saves, token_seqs = step.states
    if step.is_decode and not one_kernel:
        conv_step_kernel[(num_rows, blocks)](
            out, x, x.stride(0), spec.weight, bias, memory, memory.stride(0), slots, saves,
            step.seq_lens, num_columns, **constants,
        )  # fmt: skip
        return out
    conv_kernel[(num_rows, blocks)](
        out, x, x.stride(0), spec.weight, bias, memory, memory.stride(0), slots, saves,
        token_seqs, step.seq_starts, step.seq_lens, num_columns, **constants,
    )  # fmt: skip
    conv_state_kernel[(len(slots), blocks)](
        x, x.stride(0), memory, memory.stride(0), slots, step.seq_starts, step.seq_lens,
        num_columns, KERNEL=spec.kernel, BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
