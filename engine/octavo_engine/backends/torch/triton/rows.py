"""Kernels that work row by row: RMS norm, alone or with the residual sum, and gated units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.ops import Activation


GLU_COLUMNS = 1024


@triton.jit
def rms_norm_kernel(
    out,
    total,  # the sum, if HAS_ADD
    x,
    y,
    weight,
    num_columns,
    scale,
    eps,
    HAS_ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = norm(x + scale * y) * weight, one row."""
    row = tl.program_id(0).to(tl.int64) * num_columns
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    values = tl.load(x + row + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADD:
        values += scale * tl.load(y + row + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + row + columns, values.to(total.dtype.element_ty), mask=mask)
    mean = tl.sum(values * values, 0) / num_columns
    values = values * (1 / tl.sqrt_rn(mean + eps)) * tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + row + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def glu_kernel(
    out,  # [T, columns]
    x,  # [T, 2 * columns]
    num_columns,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = activation(left half) * right half, or what `ops.Activation` says of two halves."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    source = x + row * 2 * num_columns + columns
    left = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + num_columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "swiglu_clamped":
        left = tl.minimum(left, 7.0)
        left = left / (1 + tl.exp(tl.minimum(-1.702 * left, 80.0)))
        right = tl.minimum(tl.maximum(right, -7.0), 7.0) + 1
    elif ACTIVATION == "silu":
        left = left / (1 + tl.exp(tl.minimum(-left, 80.0)))
    elif ACTIVATION == "gelu":
        left = 0.5 * left * (1 + tl.erf(left * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (left + 0.044715 * left * left * left)
        left = left / (1 + tl.exp(tl.minimum(-2 * inner, 80.0)))
    else:
        left = tl.maximum(left, 0.0)
    tl.store(out + row * num_columns + columns, (left * right).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=out_dtype)
    _launch_norm(out, None, x, None, weight, 1.0, eps)
    return out


def add_rms_norm(
    x: Tensor, y: Tensor, scale: float, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(x + scale * y in x's dtype, its norm)."""
    out, total = torch.empty_like(x, dtype=out_dtype), torch.empty_like(x)
    _launch_norm(out, total, x, y, weight, scale, eps)
    return total, out


def _launch_norm(
    out: Tensor,
    total: Tensor | None,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    scale: float,
    eps: float,
) -> None:
    num_rows, num_columns = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(num_columns)
    rms_norm_kernel[(num_rows,)](
        out, out if total is None else total, x, x if y is None else y, weight,
        num_columns, scale, eps,
        HAS_ADD=total is not None, BLOCK=block, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip


def glu(x: Tensor, activation: Activation) -> Tensor:
    num_rows, num_columns = x.shape[0], x.shape[1] // 2
    out = x.new_empty((num_rows, num_columns))
    if num_rows:
        glu_kernel[(num_rows, triton.cdiv(num_columns, GLU_COLUMNS))](
            out, x, num_columns, ACTIVATION=activation, BLOCK=GLU_COLUMNS, num_warps=4
        )
    return out
