"""The operations at once on a device: cuBLAS for matrix products, `Kernels` for all else.

Between operations values have the weights' dtype; the residual stream, which only ever is added
to, is float32, and so are the logits. A sum is not formed before somebody asks for it, so that the
norm which follows most sums can form it on its way.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from octavo_engine.backends.torch.activations import activate
from octavo_engine.backends.torch.operands import ExpertPair, LatentOperands
from octavo_engine.backends.torch.plain import norm_heads
from octavo_engine.backends.torch.rank_group import CutTable, half_of
from octavo_engine.ops import STATE

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Literal

    from torch import Tensor

    from octavo_engine.backends.torch.cuda_loader import DeviceLinear
    from octavo_engine.backends.torch.device_adapters import DeviceAdapters
    from octavo_engine.backends.torch.device_kv import DeviceKV
    from octavo_engine.backends.torch.device_states import DeviceStates
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.backends.torch.packed import DeviceExperts
    from octavo_engine.backends.torch.rank_group import Cuts, RankGroup
    from octavo_engine.backends.torch.ropes import DeviceRopeTables
    from octavo_engine.ops import Activation, AttentionSpec, ExpertsSpec, LatentAttentionSpec


class Sum:
    """x + scale * y, not yet formed."""

    __slots__ = ("_total", "scale", "x", "y")

    def __init__(self, x: Tensor, y: Tensor, scale: float) -> None:
        self.x, self.y, self.scale = x, y, scale
        self._total: Tensor | None = None

    def form(self) -> Tensor:
        if self._total is None:
            self._total = torch.add(self.x, self.y, alpha=self.scale)
        return self._total

    def set(self, total: Tensor) -> None:
        """A kernel formed it on its way."""
        self._total = total

    @property
    def is_formed(self) -> bool:
        return self._total is not None


class Part:
    """A rank's columns of a value; the others' come when somebody asks for the whole, and a glu of
    its own halves needs none of them."""

    __slots__ = ("_group", "_whole", "cuts", "own")

    def __init__(self, own: Tensor, cuts: Cuts, group: RankGroup) -> None:
        self.own, self.cuts = own, cuts
        self._group = group
        self._whole: Tensor | None = None

    def form(self) -> Tensor:
        if self._whole is None:
            self._whole = self._group.gather(self.own, self.cuts)
        return self._whole

    def glu(self, kernels: Kernels, activation: Activation) -> Part | None:
        """None where a column and its partner are not of one rank."""
        if not self.cuts[0].of_halves:
            return None
        return Part(kernels.glu(self.own, activation), half_of(self.cuts), self._group)


Value: TypeAlias = "Tensor | Sum | Part"


class Context(NamedTuple):
    """What all steps share."""

    kernels: Kernels
    kv: DeviceKV
    ropes: DeviceRopeTables
    dtype: torch.dtype
    adapters: DeviceAdapters | None = None
    states: DeviceStates | None = None  # of models that have some
    ranks: RankGroup | None = None  # that compute each step together


class CudaOps:
    """Ops over one step."""

    def __init__(self, step: DeviceStep, context: Context) -> None:
        self._step = step
        self.wanted: Collection[str] = ()  # what is kept
        self._kept: dict[str, Value] = {}
        self._by_group = step.by_group()
        self._kernels, self._kv, self._ropes, self._dtype, self._adapters = context[:5]
        self._ranks = context.ranks

    def embedding(self, table: Tensor | CutTable, *, scale: float = 1.0) -> Tensor:
        x = self._look_up(table, self._step.token_ids).float()
        return x if scale == 1.0 else x * scale

    def table(
        self, table: Tensor | CutTable, of: Literal["positions", "types"], *, offset: int = 0
    ) -> Tensor:
        assert of == "positions", "texts of a pair are of models that pool"
        return self._look_up(table, self._step.positions.long() + offset).float()

    def _look_up(self, table: Tensor | CutTable, ids: Tensor) -> Tensor:
        if not isinstance(table, CutTable):
            return functional.embedding(ids, table)
        assert self._ranks is not None, "only ranks have parts"
        return self._ranks.look_up(table, ids.long())

    def linear(self, x: Value, weight: DeviceLinear) -> Tensor | Part:
        # float32 between operations is rounded here, as the weights were.
        x = formed(x).to(self._dtype)
        y = self._kernels.linear(x, weight)
        if self._step.adapter_tiles is not None and weight.site >= 0:
            assert self._adapters is not None
            site = self._adapters.sites[weight.site]
            self._kernels.add_adapters(y, x, site, self._adapters.arenas, self._step)
        if weight.cuts is None:
            return y
        assert self._ranks is not None, "only ranks have parts"
        return Part(y, weight.cuts, self._ranks)

    def rms_norm(self, x: Value, weight: Tensor, eps: float) -> Tensor:
        if isinstance(x, Sum) and not x.is_formed:
            total, normed = self._kernels.add_rms_norm(x.x, x.y, x.scale, weight, eps, self._dtype)
            x.set(total)
            return normed
        return self._kernels.rms_norm(formed(x), weight, eps, self._dtype)

    def layer_norm(
        self, x: Value, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        x = formed(x).float()
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps).to(self._dtype)

    def attention(self, qkv: Value, spec: AttentionSpec) -> Tensor | Part:
        cos_sin = None if spec.rope is None else self._ropes.table(spec.rope)
        qkv, step = formed(qkv), self._by_group[self._kv.group(spec.layer)]
        whole = spec
        if has_own_norm(spec):
            qkv, spec = _normed_before(qkv, spec)
        own = None
        if self._ranks is not None:
            own = self._ranks.heads(whole, is_normed=whole is not spec)
            qkv, spec = own.of(qkv), own.spec
        kv = self._kv.layer(spec.layer)
        q = self._kernels.turn_and_store(qkv, cos_sin, kv, step, spec)
        y = self._kernels.attend(q, kv, step, spec)
        if own is None:
            return y
        assert self._ranks is not None
        return Part(y, own.cuts, self._ranks)

    def latent_attention(
        self,
        q: Value,
        kv: Value,
        key_up: Tensor,
        value_up: Tensor,
        spec: LatentAttentionSpec,
    ) -> Tensor:
        operands = LatentOperands(
            formed(q), formed(kv), key_up, value_up, self._ropes.table(spec.rope),
            self._kv.latents(spec.layer),
        )  # fmt: skip
        return self._kernels.latent_attention(operands, self._step, spec)

    def glu(self, x: Value, activation: Activation) -> Tensor | Part:
        if isinstance(x, Part) and (part := x.glu(self._kernels, activation)) is not None:
            return part
        return self._kernels.glu(formed(x), activation)

    def experts(
        self,
        x: Value,
        scores: Value,
        gate_up: DeviceExperts,
        down: DeviceExperts,
        spec: ExpertsSpec,
    ) -> Tensor:
        x = formed(x).to(self._dtype)
        return self._kernels.experts(x, formed(scores), ExpertPair(gate_up, down), spec)

    def activation(self, x: Value, activation: Activation) -> Tensor:
        return activate(formed(x), activation)

    def add(self, x: Value, y: Value, *, scale: float = 1.0) -> Sum:
        return Sum(formed(x), formed(y), scale)

    def scale(self, x: Value, factor: float) -> Tensor:
        return formed(x) * factor

    def gate(self, x: Value, scores: Value) -> Tensor:
        x = formed(x)
        return (x.float() * torch.sigmoid(formed(scores).float())).to(x.dtype)

    def clamp(self, x: Value, limit: float) -> Tensor:
        return formed(x).clamp(-limit, limit)

    def soft_cap(self, x: Value, cap: float) -> Tensor:
        return cap * torch.tanh(formed(x) / cap)

    def select_rows(self, x: Value) -> Value:
        if self._step.is_decode:
            return x  # every row is wanted
        rows = self._step.logit_rows
        if isinstance(x, Sum) and not x.is_formed:
            return Sum(x.x[rows], x.y[rows], x.scale)
        return formed(x)[rows]

    def add_picture_rows(self, x: Value, index: int) -> Value:
        return x  # there are no pictures

    def keep(self, name: str, x: Value) -> Value:
        if name in self.wanted:
            self._kept[name] = x
        return x

    def kept(self, name: str) -> Tensor:
        """Behind the step; a sum was formed by then, as a norm followed it."""
        return formed(self._kept[name])


class CudaDraftOps(CudaOps):
    """DraftOps over one step and its states."""

    def __init__(self, step: DeviceStep, context: Context, states: Tensor | None) -> None:
        super().__init__(step, context)
        self.wanted = (STATE,)
        self._states = states

    def input(self, columns: int, *, first: int = 0) -> Tensor:
        assert self._states is not None and first == 0 and self._states.shape[1] == columns
        return self._states


def has_own_norm(spec: AttentionSpec) -> bool:
    """Whether heads are normed, before rope, in a way that kernels do not know."""
    if spec.q_norm is None or spec.norm_after_rope:
        return False
    return spec.norm != "rms" or len(spec.q_norm) != spec.head_dim


def _normed_before(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, AttentionSpec]:
    """With q and k normed in torch, and the spec of what is left to do."""
    sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    q, k, v = torch.split(qkv.view(len(qkv), sum(sizes), spec.head_dim), sizes, dim=1)
    q = norm_heads(q.float(), spec.q_norm, spec).to(qkv.dtype)
    k = norm_heads(k.float(), spec.k_norm, spec).to(qkv.dtype)
    rest = dataclasses.replace(spec, q_norm=None, k_norm=None)
    return torch.cat([q, k, v], dim=1).flatten(1), rest


def formed(x: Value) -> Tensor:
    """A value as a tensor of all its columns."""
    return x if isinstance(x, torch.Tensor) else x.form()
