"""How a product's work is cut: tiles of rows and outputs, and for few rows the inputs as well.

A few rows keep too few processors busy, so the inputs are split; the parts are summed in a fixed
order, which keeps a step's bits the same each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FEW_ROWS = 16
MAX_SPLITS = 16
MIN_STEPS = 4  # of a loop over inputs, that a split be worth its launch
JOIN_COLUMNS = 512


class AxisCut(NamedTuple):
    block_m: int
    block_n: int
    num_splits: int
    steps_per_split: int
    num_warps: int
    num_stages: int


def cut(
    num_rows: int,
    num_outputs: int,
    num_steps: int,
    num_processors: int,
    *,
    batch_invariant: bool,
    sums_twice: bool = False,
) -> AxisCut:
    """For a loop of `num_steps` over the inputs; with `sums_twice` a step's own sum needs registers
    beside the total. Where bits must not depend on the number of rows, neither does the cut."""
    block_n = 64 if sums_twice else 128
    if batch_invariant:
        return AxisCut(64, block_n, 1, num_steps, 4, 3)
    if num_rows > FEW_ROWS:
        block_m = 64 if num_rows <= 64 else 128
        return AxisCut(block_m, block_n, 1, num_steps, block_m // 16, 3)
    programs = -(-num_outputs // 64)
    wanted = min(MAX_SPLITS, 2 * num_processors // programs, num_steps // MIN_STEPS)
    steps = -(-num_steps // max(1, wanted))
    return AxisCut(FEW_ROWS, 64, -(-num_steps // steps), steps, 4, 4)


# Numbers that change from step to step are not specialised: Triton would compile a kernel for one,
# one for multiples of 16 and one for all others, each when it first meets them.
@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def join_kernel(
    out,  # [M, N]
    parts,  # float32 [splits, M, N]
    bias,
    num_rows,
    num_outputs,
    num_splits,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = the sum over splits, first to last, + bias."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_outputs
    total = tl.zeros([BLOCK], tl.float32)
    source = parts + row * num_outputs + columns
    for _ in range(num_splits):
        total += tl.load(source, mask=mask, other=0.0)
        source += num_rows * num_outputs
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + columns, total.to(out.dtype.element_ty), mask=mask)


def join(parts: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The sum of the parts, + bias."""
    num_splits, num_rows, num_outputs = parts.shape
    out = parts.new_empty((num_rows, num_outputs), dtype=out_dtype)
    join_kernel[(num_rows, triton.cdiv(num_outputs, JOIN_COLUMNS))](
        out, parts, parts if bias is None else bias, num_rows, num_outputs, num_splits,
        HAS_BIAS=bias is not None, BLOCK=JOIN_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
