"""The operations of models that pool, on a device: those of `cuda_ops.py`, and over whole texts.

Values between operations have the weights' dtype, as there. A sum is float32 where the residual
stream is one (norms come before blocks); where each sum is normed at once (BERT), what the norm
gives is the stream, and the sum itself is never written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional

from octavo_engine.backends.torch.cuda_ops import (
    CudaOps,
    Sum,
    _normed_before,
    formed,
    has_own_norm,
)
from octavo_engine.backends.torch.operands import LayerKV, NormWeights

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.cuda_ops import Value
    from octavo_engine.backends.torch.kernels import Kernels
    from octavo_engine.backends.torch.rank_group import CutTable
    from octavo_engine.backends.torch.ropes import DeviceRopeTables
    from octavo_engine.backends.torch.text_kernels import TextKernels
    from octavo_engine.backends.torch.text_step import TextStep
    from octavo_engine.ops import AttentionSpec, Pool


class TextOps(CudaOps):
    """EncoderOps over one step of whole texts."""

    def __init__(
        self,
        step: TextStep,
        kernels: Kernels,
        text_kernels: TextKernels,
        ropes: DeviceRopeTables,
        dtype: torch.dtype,
        *,
        keeps_sums: bool,
    ) -> None:
        self.wanted, self._kept = (), {}  # nobody drafts
        self._ranks = None
        self._texts = step
        self._step = step  # type: ignore[assignment]  # has all that is read of a step here
        self._kernels, self._ropes, self._dtype = kernels, ropes, dtype
        self._text_kernels = text_kernels
        self._keeps_sums = keeps_sums

    def table(
        self, table: Tensor | CutTable, of: Literal["positions", "types"], *, offset: int = 0
    ) -> Tensor:
        assert isinstance(table, torch.Tensor), "models that pool have no ranks"
        ids = self._texts.positions if of == "positions" else self._texts.type_ids
        return functional.embedding(ids.long() + offset, table).float()

    def add(self, x: Value, y: Value, *, scale: float = 1.0) -> Sum:
        x = formed(x)
        return Sum(x.float() if self._keeps_sums else x, formed(y), scale)

    def layer_norm(
        self, x: Value, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        first, second, scale = x, None, 1.0
        if isinstance(x, Sum) and not x.is_formed:
            first, second, scale = x.x, x.y, x.scale
        total, normed = self._text_kernels.layer_norm(
            formed(first), second, scale, NormWeights(weight, bias, eps, self._dtype),
            keeps_sum=self._keeps_sums,
        )  # fmt: skip
        if total is not None and isinstance(x, Sum):
            x.set(total)
        return normed

    def encoder_attention(self, qkv: Value, spec: AttentionSpec) -> Tensor:
        qkv = formed(qkv)
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        if spec.rope is None and spec.q_norm is None and spec.k_norm is None:
            q, k, v = torch.split(qkv, [size * spec.head_dim for size in sizes], dim=1)
            return self._text_kernels.attend(q, k, v, self._texts, spec)
        if has_own_norm(spec):
            qkv, spec = _normed_before(qkv, spec)
        cos_sin = None if spec.rope is None else self._ropes.table(spec.rope)
        k, v = qkv.new_empty((2, len(qkv), 1, spec.num_kv_heads, spec.head_dim)).unbind()
        q = self._kernels.turn_and_store(qkv, cos_sin, LayerKV(k, v), self._step, spec)
        return self._text_kernels.attend(q, k.flatten(1), v.flatten(1), self._texts, spec)

    def pool(self, x: Value, how: Pool) -> Tensor:
        return self._text_kernels.pool(formed(x), self._texts, how)
