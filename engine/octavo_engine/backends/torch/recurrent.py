"""Recurrent states in plain torch: one token after the other, as the formulas are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from octavo_engine.backends.torch.activations import activate
from octavo_engine.backends.torch.streams import ReferenceStreamOps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.torch.precision import Precision
    from octavo_engine.backends.torch.reference import PagedKV, TorchAdapter
    from octavo_engine.caches import CacheLayout
    from octavo_engine.ops import ConvSpec, DeltaSpec, SelectiveSpec, SsdSpec


class StateMemory(Protocol):
    """Slots with the states of all layers that have one."""

    def layer(self, index: int) -> Tensor:
        """[slots, values] of a layer, by its index into the caches."""


class TorchStates:
    """States as torch tensors, a tensor for each layer."""

    def __init__(self, layout: CacheLayout, num_slots: int, dtype: torch.dtype) -> None:
        self._ordinals = layout.ordinals()
        self._layers = [
            torch.zeros((num_slots, spec.num_values), dtype=dtype) for spec in layout.states
        ]

    def layer(self, index: int) -> Tensor:
        return self._layers[self._ordinals[index]]

    def copy(self, copies: Sequence[Sequence[int]]) -> None:
        for source, target in copies:
            for layer in self._layers:
                layer[target] = layer[source]

    def poison(self, slots: list[int]) -> None:
        for layer in self._layers:
            layer[slots] = torch.nan


class TokenScans:
    """What goes from token to token in one step, over a memory of states."""

    def __init__(self, step: BackendStep, memory: StateMemory) -> None:
        self._step, self._memory = step, memory

    def short_conv(self, x: Tensor, spec: ConvSpec) -> Tensor:
        weight = spec.weight[:, 0].T  # [kernel, columns]
        count = (spec.kernel - 1) * x.shape[1]

        def compute(state: Tensor, token: int) -> Tensor:
            window = torch.cat([state.view(-1, x.shape[1]), x[token][None]])
            state[:] = window[1:].flatten()
            y = (window * weight).sum(0)
            y = y if spec.bias is None else y + spec.bias
            return y if spec.activation is None else activate(y, spec.activation)

        return self._scan(spec.layer, slice(0, count), compute)

    def ssd_scan(self, xbc: Tensor, dt: Tensor, spec: SsdSpec) -> Tensor:
        heads, dim, size = spec.num_heads, spec.head_dim, spec.state_size
        inner, each = heads * dim, spec.num_groups * size
        a = -spec.a_log.exp()
        steps = functional.softplus(dt + spec.dt_bias).clamp(spec.dt_min, spec.dt_max)

        def compute(state: Tensor, token: int) -> Tensor:
            x, b, c = torch.split(xbc[token], [inner, each, each])
            x = x.view(heads, 1, dim)
            b, c = (
                part.view(spec.num_groups, size).repeat_interleave(heads // spec.num_groups, dim=0)
                for part in (b, c)
            )
            scanned = state.view(heads, size, dim)
            scanned *= (a * steps[token]).exp()[:, None, None]
            scanned += steps[token][:, None, None] * b[:, :, None] * x
            y: Tensor = (c[:, :, None] * scanned).sum(1) + spec.d[:, None] * x[:, 0]
            return y.flatten()

        return self._scan(spec.layer, slice(spec.offset, None), compute)

    def selective_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, spec: SelectiveSpec
    ) -> Tensor:
        a = -spec.a_log.exp().T  # [state_size, width]
        steps = functional.softplus(dt + spec.dt_bias)

        def compute(state: Tensor, token: int) -> Tensor:
            scanned = state.view(spec.state_size, spec.width)
            scanned *= (a * steps[token]).exp()
            scanned += b[token][:, None] * (steps[token] * x[token])
            y: Tensor = (c[token][:, None] * scanned).sum(0) + spec.d * x[token]
            return y

        return self._scan(spec.layer, slice(spec.offset, None), compute)

    def delta_rule(self, qkv: Tensor, gates: Tensor, spec: DeltaSpec) -> Tensor:
        heads, size, dim = spec.num_value_heads, spec.key_dim, spec.value_dim
        keys = spec.num_key_heads * size
        beta = torch.sigmoid(gates[:, :heads])
        dt = functional.softplus(gates[:, heads:] + spec.dt_bias)
        decay = (-spec.a_log.exp() * dt).exp()

        def of_heads(x: Tensor) -> Tensor:
            x = x.view(spec.num_key_heads, size)
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
            return x.repeat_interleave(heads // spec.num_key_heads, dim=0)[:, :, None]

        def compute(state: Tensor, token: int) -> Tensor:
            q, k, v = torch.split(qkv[token], [keys, keys, heads * dim])
            scanned = state.view(heads, size, dim)
            scanned *= decay[token][:, None, None]
            key = of_heads(k)
            missing = v.view(heads, dim) - (scanned * key).sum(1)
            scanned += key * (missing * beta[token][:, None])[:, None]
            y: Tensor = (scanned * of_heads(q) * size**-0.5).sum(1)
            return y.flatten()

        return self._scan(spec.layer, slice(spec.offset, None), compute)

    def _scan(self, layer: int, part: slice, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
        """`compute(state, token)` changes that part of the state; the outputs of all tokens."""
        step = self._step
        assert step.states is not None, "a model with states needs slots for them"
        memory = self._memory.layer(layer)[:, part]
        rows = []
        for index, slot in enumerate(step.states.slots.tolist()):
            first, end = step.seq_starts[index : index + 2].tolist()
            state = memory[slot].clone()
            if step.seq_lens[index] == end - first:
                state.zero_()
            for token in range(first, end):
                rows.append(compute(state, token))
                if (saved := int(step.states.saves[token])) >= 0:
                    memory[saved] = state
            memory[slot] = state
        return torch.stack(rows)


class ReferenceRecurrentOps(ReferenceStreamOps):
    """RecurrentOps over one step."""

    def __init__(
        self,
        step: BackendStep,
        kv: PagedKV,
        states: TorchStates,
        precision: Precision,
        adapters: Mapping[int, TorchAdapter],
    ) -> None:
        super().__init__(step, kv, precision, adapters)
        self._scans = TokenScans(step, states)

    def short_conv(self, x: Tensor, spec: ConvSpec) -> Tensor:
        return self._scans.short_conv(x, spec)

    def ssd_scan(self, xbc: Tensor, dt: Tensor, spec: SsdSpec) -> Tensor:
        return self._scans.ssd_scan(xbc, dt, spec)

    def selective_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, spec: SelectiveSpec
    ) -> Tensor:
        return self._scans.selective_scan(x, dt, b, c, spec)

    def delta_rule(self, qkv: Tensor, gates: Tensor, spec: DeltaSpec) -> Tensor:
        return self._scans.delta_rule(qkv, gates, spec)
