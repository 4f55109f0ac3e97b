"""A matrix product whose rows do not depend on how many there are, for batch-invariant results.

cuBLAS chooses a kernel by the number of rows, and each sums in its own order. Here the cut
is the same for any number, and so are a row's sums; that costs speed, most of all for few rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    out,  # [M, N]
    x,  # [M, K]
    weight,  # [N, K]
    bias,  # [N]
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    # Programs of the same outputs run side by side: their part of the weights is in the cache.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, output_ok = rows < num_rows, outputs < num_outputs
    x_rows = x + rows.to(tl.int64)[:, None] * num_inputs
    weight_rows = weight + outputs.to(tl.int64)[None, :] * num_inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, num_inputs, BLOCK_K):
        inputs = k + tl.arange(0, BLOCK_K)
        input_ok = inputs < num_inputs
        a_mask = row_ok[:, None] & input_ok[None, :]
        a = tl.load(x_rows + inputs[None, :], mask=a_mask, other=0.0)
        b_mask = input_ok[:, None] & output_ok[None, :]
        b = tl.load(weight_rows + inputs[:, None], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee") if EXACT else tl.dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & output_ok[None, :])


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x · weightᵀ + bias."""
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    out = x.new_empty((num_rows, num_outputs), dtype=out_dtype)
    if num_rows:
        matmul_kernel[(triton.cdiv(num_rows, BLOCK_M), triton.cdiv(num_outputs, BLOCK_N))](
            out, x, weight, weight if bias is None else bias, num_rows, num_outputs, num_inputs,
            HAS_BIAS=bias is not None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            EXACT=x.dtype == torch.float32, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
