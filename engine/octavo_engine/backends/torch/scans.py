"""What goes on from token to token, as a seam beside `kernels.Kernels`: plain torch or Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from octavo_engine.backends.torch.activations import activate
from octavo_engine.backends.torch.recurrent import TokenScans

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo_engine.backends.torch.device_states import DeviceStates
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import SelectiveOperands
    from octavo_engine.ops import Activation, ConvSpec, DeltaSpec, SelectiveSpec, SsdSpec


class ScanKernels(Protocol):
    """As `ops.RecurrentOps`, with what a step and its states are. Operands may be columns of a
    wider matrix; results have their dtype, and are whole. States are changed in place."""

    def short_conv(
        self, x: Tensor, states: DeviceStates, step: DeviceStep, spec: ConvSpec
    ) -> Tensor: ...

    def ssd_scan(
        self, xbc: Tensor, dt: Tensor, states: DeviceStates, step: DeviceStep, spec: SsdSpec
    ) -> Tensor: ...

    def selective_scan(
        self, x: SelectiveOperands, states: DeviceStates, step: DeviceStep, spec: SelectiveSpec
    ) -> Tensor: ...

    def delta_rule(
        self, qkv: Tensor, gates: Tensor, states: DeviceStates, step: DeviceStep, spec: DeltaSpec
    ) -> Tensor: ...

    def multiply(self, x: Tensor, y: Tensor, activation: Activation | None) -> Tensor: ...

    def group_norm(self, x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor: ...


class PlainScans:
    """One token after the other, in float32. Looks at the step on the host."""

    def short_conv(
        self, x: Tensor, states: DeviceStates, step: DeviceStep, spec: ConvSpec
    ) -> Tensor:
        return _scanned(step, states, lambda scans: scans.short_conv(x.float(), spec)).to(x.dtype)

    def ssd_scan(
        self, xbc: Tensor, dt: Tensor, states: DeviceStates, step: DeviceStep, spec: SsdSpec
    ) -> Tensor:
        y = _scanned(step, states, lambda scans: scans.ssd_scan(xbc.float(), dt.float(), spec))
        return y.to(xbc.dtype)

    def selective_scan(
        self, x: SelectiveOperands, states: DeviceStates, step: DeviceStep, spec: SelectiveSpec
    ) -> Tensor:
        xs, dt, b, c = (operand.float() for operand in x)
        y = _scanned(step, states, lambda scans: scans.selective_scan(xs, dt, b, c, spec))
        return y.to(x.x.dtype)

    def delta_rule(
        self, qkv: Tensor, gates: Tensor, states: DeviceStates, step: DeviceStep, spec: DeltaSpec
    ) -> Tensor:
        y = _scanned(step, states, lambda scans: scans.delta_rule(qkv.float(), gates.float(), spec))
        return y.to(qkv.dtype)

    def multiply(self, x: Tensor, y: Tensor, activation: Activation | None) -> Tensor:
        factor = y.float() if activation is None else activate(y.float(), activation)
        return (x.float() * factor).to(x.dtype)

    def group_norm(self, x: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
        groups = x.float().reshape(len(x), -1, size)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        return (normed * weight.view(-1, size)).flatten(1).to(x.dtype)


def _scanned(
    step: DeviceStep, states: DeviceStates, scan: Callable[[TokenScans], Tensor]
) -> Tensor:
    assert step.host is not None, "plain scans need the step's sizes on the host"
    return scan(TokenScans(step.host, states))
