"""The Triton kernels of recurrent states as one answer to `scans.ScanKernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo_engine.backends.torch.activations import activate
from octavo_engine.backends.torch.triton import chunked, chunked_delta, short_conv, state_scans

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_states import DeviceStates
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import SelectiveOperands
    from octavo_engine.ops import Activation, ConvSpec, DeltaSpec, SelectiveSpec, SsdSpec

COLUMNS = 1024


@triton.jit
def multiply_kernel(
    out,
    x,  # rows x_stride apart
    x_stride,
    y,
    y_stride,
    num_columns,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x * activation(y)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    left = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(y + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        right = right / (1 + tl.exp(tl.minimum(-right, 80.0)))
    elif ACTIVATION == "sigmoid":
        right = 1 / (1 + tl.exp(tl.minimum(-right, 80.0)))
    tl.store(out + row * num_columns + columns, (left * right).to(out.dtype.element_ty), mask=mask)


@triton.jit
def group_norm_kernel(
    out,
    x,
    x_stride,
    weight,  # of all columns, or of a group's
    eps,
    num_columns,
    SIZE: tl.constexpr,
    IS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    values = tl.load(x + row * x_stride + group * SIZE + columns, mask=mask, other=0.0)
    values = values.to(tl.float32)
    mean = tl.sum(values * values, 0) / SIZE
    own = weight + columns if IS_SHARED else weight + group * SIZE + columns
    values = values * (1 / tl.sqrt_rn(mean + eps)) * tl.load(own, mask=mask, other=0.0)
    target = out + row * num_columns + group * SIZE + columns
    tl.store(target, values.to(out.dtype.element_ty), mask=mask)


class TritonScans:
    """Launches; single tokens go through other kernels than prompts, unless results must be the
    same whatever a token is computed with."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def short_conv(
        self, x: Tensor, states: DeviceStates, step: DeviceStep, spec: ConvSpec
    ) -> Tensor:
        return short_conv.short_conv(x, states, step, spec, one_kernel=self._batch_invariant)

    def ssd_scan(
        self, xbc: Tensor, dt: Tensor, states: DeviceStates, step: DeviceStep, spec: SsdSpec
    ) -> Tensor:
        if step.is_decode or self._batch_invariant:
            return state_scans.ssd_scan(xbc, dt, states, step, spec)
        return chunked.ssd_scan(xbc, dt, states, step, spec)

    def selective_scan(
        self, x: SelectiveOperands, states: DeviceStates, step: DeviceStep, spec: SelectiveSpec
    ) -> Tensor:
        return state_scans.selective_scan(x, states, step, spec)

    def delta_rule(
        self, qkv: Tensor, gates: Tensor, states: DeviceStates, step: DeviceStep, spec: DeltaSpec
    ) -> Tensor:
        if step.is_decode or self._batch_invariant:
            return state_scans.delta_rule(qkv, gates, states, step, spec)
        return chunked_delta.delta_rule(qkv, gates, states, step, spec)

    def multiply(self, x: Tensor, y: Tensor, activation: Activation | None) -> Tensor:
        if activation not in (None, "silu", "sigmoid"):
            y, activation = activate(y.float(), activation), None
        num_rows, num_columns = x.shape
        out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
        if num_rows:
            multiply_kernel[(num_rows, triton.cdiv(num_columns, COLUMNS))](
                out, x, x.stride(0), y, y.stride(0), num_columns,
                ACTIVATION=activation or "", BLOCK=COLUMNS, num_warps=4,
            )  # fmt: skip
        return out

    def group_norm(self, x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
        num_rows, num_columns = x.shape
        out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
        if num_rows:
            block = triton.next_power_of_2(size)
            group_norm_kernel[(num_rows, num_columns // size)](
                out, x, x.stride(0), weight, eps, num_columns,
                SIZE=size, IS_SHARED=len(weight) == size, BLOCK=block,
                num_warps=max(1, min(8, block // 512)),
            )  # fmt: skip
        return out
