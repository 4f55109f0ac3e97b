"""Products of int8 or FP8 on both sides: the input is rounded row by row first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.packed import LARGEST, RoundedRows
from octavo_engine.backends.torch.triton.e4m3 import round_to_e4m3
from octavo_engine.backends.torch.triton.splits import FEW_ROWS, cut, join

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.packed import ScaledWeight

BLOCK_K = 128


@triton.jit
def round_rows_kernel(
    out,  # int8 or float8e4nv [M, K]
    scales,  # [M, blocks]
    x,  # [M, K]
    num_columns,
    block_columns,
    num_blocks,
    largest,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one row: its largest value becomes `largest`."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    columns = block * block_columns + lanes
    mask = (lanes < block_columns) & (columns < num_columns)
    values = tl.load(x + row * num_columns + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), 0), largest)
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row * num_blocks + block, scale)
    values = tl.div_rn(values, scale)
    if not IS_INTEGER:
        values = round_to_e4m3(values)
    if IS_INTEGER:
        values = (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest, ties to even
    tl.store(out + row * num_columns + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def scaled_kernel(
    out,  # [splits, M, N]
    x,  # [M, K]
    x_scales,  # [M, blocks]
    values,  # [N, K]
    scales,  # [N, blocks]
    bias,  # [N], if HAS_BIAS
    num_rows,
    num_outputs,
    num_inputs,
    num_blocks,
    steps_per_split,
    IS_INTEGER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,  # a scale for each BLOCK_K columns, else one for all
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[split] = x · valuesᵀ times the scales of both, over the split's steps."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row_ok, output_ok = rows < num_rows, outputs < num_outputs
    first = split * steps_per_split
    last = tl.minimum(first + steps_per_split, tl.cdiv(num_inputs, BLOCK_K))
    result = scaled_sum(
        x, x_scales, values, scales, rows.to(tl.int64), outputs.to(tl.int64), row_ok, output_ok,
        first, last, num_inputs, num_blocks, IS_INTEGER, IN_BLOCKS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[None, :]
    target = out + (split.to(tl.int64) * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=row_ok[:, None] & output_ok[None, :])


@triton.jit
def scaled_sum(
    x,
    x_scales,
    values,
    scales,
    rows,  # int64 [BLOCK_M]: of x
    value_rows,  # int64 [BLOCK_N]
    row_ok,
    output_ok,
    first,
    last,
    num_inputs,
    num_blocks,
    IS_INTEGER: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of rows of x and of a weight over steps [first, last) of their columns."""
    x_scale_rows = x_scales + rows * num_blocks
    scale_rows = scales + value_rows * num_blocks
    x_rows = x + rows[:, None] * num_inputs
    values = values + value_rows[None, :] * num_inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if IS_INTEGER else tl.float32)
    for step in range(first, last):
        columns = step * BLOCK_K + tl.arange(0, BLOCK_K)
        column_ok = columns < num_inputs
        a_mask = row_ok[:, None] & column_ok[None, :]
        b_mask = column_ok[:, None] & output_ok[None, :]
        a = tl.load(x_rows + columns[None, :], mask=a_mask, other=0.0)
        b = tl.load(values + columns[:, None], mask=b_mask, other=0.0)
        if IS_INTEGER:
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        elif IN_BLOCKS:
            x_scale = tl.load(x_scale_rows + step, mask=row_ok, other=0.0)
            scale = tl.load(scale_rows + step, mask=output_ok, other=0.0)
            acc += tl.dot(a, b) * x_scale[:, None] * scale[None, :]
        else:
            # Hopper's units keep few bits of a long sum of FP8: it goes on in registers each step.
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
    result = acc.to(tl.float32)
    if not IN_BLOCKS:
        x_scale = tl.load(x_scale_rows, mask=row_ok, other=0.0)
        scale = tl.load(scale_rows, mask=output_ok, other=0.0)
        result = result * x_scale[:, None] * scale[None, :]
    return result


def round_rows(x: Tensor, dtype: torch.dtype, block: int) -> RoundedRows:
    """As `packed.round_rows`."""
    num_rows, num_columns = x.shape
    num_blocks = triton.cdiv(num_columns, block)
    out = torch.empty_like(x, dtype=dtype)
    scales = x.new_empty((num_rows, num_blocks), dtype=torch.float32)
    lanes = triton.next_power_of_2(block)
    round_rows_kernel[(num_rows, num_blocks)](
        out, scales, x, num_columns, block, num_blocks, LARGEST[dtype],
        IS_INTEGER=dtype == torch.int8, BLOCK=lanes, num_warps=max(1, min(16, lanes // 512)),
    )  # fmt: skip
    return RoundedRows(out, scales)


def _fits_library(x: Tensor, weight: ScaledWeight, out_dtype: torch.dtype) -> bool:
    """Whether cuBLAS' kin multiplies FP8 with a scale for each row of both: on Hopper, and where
    rows are many it does so faster."""
    return (
        x.is_cuda
        and x.dtype == torch.float8_e4m3fn
        and out_dtype == torch.bfloat16
        and len(x) > FEW_ROWS
        and all(size % 16 == 0 for size in weight.shape)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def matmul(
    x: Tensor,
    weight: ScaledWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    num_processors: int,
    batch_invariant: bool = False,
) -> Tensor:
    """x, rounded, · weightᵀ + bias."""
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    if num_rows == 0:
        return x.new_empty((0, num_outputs), dtype=out_dtype)
    dtype = weight.values.dtype
    in_blocks = weight.block < num_inputs
    step = weight.block if in_blocks else BLOCK_K
    rounded = round_rows(x.contiguous(), dtype, weight.block)
    if not batch_invariant and not in_blocks and _fits_library(rounded.values, weight, out_dtype):
        return torch._scaled_mm(
            rounded.values, weight.values.t(), scale_a=rounded.scales, scale_b=weight.scales.t(),
            bias=bias, out_dtype=out_dtype,
        )  # fmt: skip
    num_steps = triton.cdiv(num_inputs, step)
    work = cut(
        num_rows, num_outputs, num_steps, num_processors,
        batch_invariant=batch_invariant, sums_twice=in_blocks,
    )  # fmt: skip
    parts = x.new_empty(
        (work.num_splits, num_rows, num_outputs),
        dtype=out_dtype if work.num_splits == 1 else torch.float32,
    )
    own_bias = bias if work.num_splits == 1 else None
    scaled_kernel[(triton.cdiv(num_rows, work.block_m), triton.cdiv(num_outputs, work.block_n),
                   work.num_splits)](
        parts, rounded.values, rounded.scales, weight.values, weight.scales,
        weight.scales if own_bias is None else own_bias,
        num_rows, num_outputs, num_inputs, weight.scales.shape[1], work.steps_per_split,
        IS_INTEGER=dtype == torch.int8, HAS_BIAS=own_bias is not None, IN_BLOCKS=in_blocks,
        BLOCK_M=work.block_m, BLOCK_N=work.block_n, BLOCK_K=step,
        num_warps=work.num_warps, num_stages=work.num_stages,
    )  # fmt: skip
    return parts[0] if work.num_splits == 1 else join(parts, bias, out_dtype)
