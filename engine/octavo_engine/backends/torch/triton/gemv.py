"""Products of one row: nothing but reading the weights counts.

Libraries cut such products for the matrix units, and where there are few outputs they sum parts in
a second launch. Here a program reads whole rows of the weight, a few at a time, and every thread
multiplies what it has read. With two rows and more the matrix units are faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK_N, BLOCK_K = 4, 2048  # outputs of a program, and inputs at a time


@triton.jit
def gemv_kernel(
    out,  # [N]
    x,  # [K]
    weight,  # [N, K]
    bias,  # [N]
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # no block of outputs or inputs is partly filled
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_ok = outputs < num_outputs
    inputs = tl.arange(0, BLOCK_K)
    places = weight + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, num_inputs, BLOCK_K):
        if IS_WHOLE:
            w = tl.load(places + k, eviction_policy="evict_first")
            values = tl.load(x + k + inputs)
        else:
            input_ok = k + inputs < num_inputs
            w = tl.load(places + k, mask=output_ok[:, None] & input_ok[None, :], other=0.0)
            values = tl.load(x + k + inputs, mask=input_ok, other=0.0)
        acc += w.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(acc, 1)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=output_ok)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [1, K] · weightᵀ + bias."""
    num_outputs, num_inputs = weight.shape
    block_k = min(BLOCK_K, max(256, triton.next_power_of_2(num_inputs)))
    out = x.new_empty((1, num_outputs), dtype=out_dtype)
    gemv_kernel[(triton.cdiv(num_outputs, BLOCK_N),)](
        out, x, weight, weight if bias is None else bias, num_outputs, num_inputs,
        HAS_BIAS=bias is not None, BLOCK_N=BLOCK_N, BLOCK_K=block_k,
        IS_WHOLE=num_outputs % BLOCK_N == 0 and num_inputs % block_k == 0,
        num_warps=max(1, block_k // 256),
    )  # fmt: skip
    return out
