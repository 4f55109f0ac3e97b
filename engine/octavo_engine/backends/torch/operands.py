"""Tensors that go into a kernel together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo_engine.backends.torch.packed import DeviceExperts


class LayerKV(NamedTuple):
    """The pages of one layer's keys and values; `scales` of both where they have eight bits."""

    k: Tensor
    v: Tensor
    scales: tuple[Tensor, Tensor] | None = None


class LatentOperands(NamedTuple):
    """What latent attention reads and, in `cache` ([blocks, 16, 1, rank + rope_dim]), writes."""

    q: Tensor
    kv: Tensor
    key_up: Tensor
    value_up: Tensor
    cos_sin: Tensor
    cache: Tensor


class SelectiveOperands(NamedTuple):
    """The inputs of a selective scan, as `RecurrentOps.selective_scan` names them."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


class ExpertPair(NamedTuple):
    """Both layers of all experts."""

    gate_up: DeviceExperts
    down: DeviceExperts


class NormWeights(NamedTuple):
    """Of a layer norm; `dtype` is its result's."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    dtype: torch.dtype


class PageMoves(NamedTuple):
    """Blocks of the KV cache and the slots they go to or come from, int32 both; where a block is
    -1, nothing moves. `first`: the word of a slot where the region begins."""

    block_ids: Tensor
    slots: Tensor
    first: int
