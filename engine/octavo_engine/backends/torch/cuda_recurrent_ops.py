"""The operations of models with recurrent states, beside those of `cuda_ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.cuda_ops import CudaOps, formed
from octavo_engine.backends.torch.operands import SelectiveOperands

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.cuda_loader import DeviceLinear
    from octavo_engine.backends.torch.cuda_ops import Context, Part, Value
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.ops import Activation, ConvSpec, DeltaSpec, SelectiveSpec, SsdSpec


class CudaRecurrentOps(CudaOps):
    """RecurrentOps over one step."""

    def __init__(self, step: DeviceStep, context: Context) -> None:
        super().__init__(step, context)
        assert context.states is not None, "the model has states"
        self._states, self._scans = context.states, context.kernels.scans

    def linear(self, x: Value, weight: DeviceLinear) -> Tensor | Part:
        return super().linear(formed(x).contiguous(), weight)

    def columns(self, x: Value, first: int, count: int) -> Tensor:
        return formed(x)[:, first : first + count]

    def join(self, x: Value, y: Value) -> Tensor:
        return torch.cat((formed(x), formed(y)), dim=1)

    def multiply(self, x: Value, y: Value, activation: Activation | None = None) -> Tensor:
        return self._scans.multiply(formed(x), formed(y), activation)

    def group_norm(self, x: Value, weight: Tensor, eps: float, size: int) -> Tensor:
        return self._scans.group_norm(formed(x), weight, eps, size)

    def short_conv(self, x: Value, spec: ConvSpec) -> Tensor:
        return self._scans.short_conv(formed(x), self._states, self._step, spec)

    def ssd_scan(self, xbc: Value, dt: Value, spec: SsdSpec) -> Tensor:
        return self._scans.ssd_scan(formed(xbc), formed(dt), self._states, self._step, spec)

    def selective_scan(
        self, x: Value, dt: Value, b: Value, c: Value, spec: SelectiveSpec
    ) -> Tensor:
        operands = SelectiveOperands(formed(x), formed(dt), formed(b), formed(c))
        return self._scans.selective_scan(operands, self._states, self._step, spec)

    def delta_rule(self, qkv: Value, gates: Value, spec: DeltaSpec) -> Tensor:
        return self._scans.delta_rule(formed(qkv), formed(gates), self._states, self._step, spec)
