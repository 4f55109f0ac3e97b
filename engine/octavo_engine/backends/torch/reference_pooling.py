"""The operations of models that pool, in plain torch: what the fast ones must equal."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.reference import ReferenceOps

if TYPE_CHECKING:
    from typing import Literal

    from torch import Tensor

    from octavo_engine.backends.pooling import PoolingStep
    from octavo_engine.backends.torch.precision import Precision
    from octavo_engine.backends.torch.rank_group import CutTable
    from octavo_engine.ops import AttentionSpec, Pool


class ReferencePoolingOps(ReferenceOps):
    """EncoderOps over one step of whole texts."""

    def __init__(self, step: PoolingStep, precision: Precision) -> None:
        self._precision, self._ranks = precision, None
        self._token_ids = torch.from_numpy(step.token_ids).long()
        self._positions = torch.from_numpy(step.positions)
        self._type_ids = torch.from_numpy(step.type_ids).long()
        self._logit_rows = torch.from_numpy(step.pooled_rows).long()
        self._inputs = None
        self._rope_positions: Tensor | None = None
        self._row_slots = None  # models that pool take no adapters
        self.wanted = ()  # nothing drafts from their layers
        self._texts = [slice(a, b) for a, b in itertools.pairwise(step.starts.tolist())]

    def table(
        self, table: Tensor | CutTable, of: Literal["positions", "types"], *, offset: int = 0
    ) -> Tensor:
        assert isinstance(table, torch.Tensor), "models that pool have no ranks"
        ids = self._positions.long() if of == "positions" else self._type_ids
        return table[ids + offset]

    def texts(self) -> list[tuple[Tensor, Tensor]]:
        """Token and type ids of each."""
        return [(self._token_ids[text], self._type_ids[text]) for text in self._texts]

    def pool(self, x: Tensor, how: Pool) -> Tensor:
        return torch.stack([pooled(x[text], how) for text in self._texts])

    def encoder_attention(self, qkv: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = self._heads(qkv, spec)
        return torch.cat([attend_whole(q[own], k[own], v[own], spec) for own in self._texts])


def pooled(x: Tensor, how: Pool) -> Tensor:
    """One text's row from its tokens'."""
    match how:
        case "mean":
            return x.mean(0)
        case "max":
            return x.amax(0)
        case "mean_sqrt_len":
            return x.sum(0) / math.sqrt(len(x))
        case "weightedmean":
            weights = torch.arange(1, len(x) + 1, dtype=x.dtype, device=x.device)[:, None]
            return (weights * x).sum(0) / weights.sum()


def attend_whole(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    positions = torch.arange(len(q), device=q.device)
    distance = positions[:, None] - positions
    visible = distance >= 0 if spec.is_causal else torch.ones_like(distance, dtype=torch.bool)
    if spec.window is not None:
        visible &= distance.abs() < spec.window
    scores = torch.einsum("thd,shd->hts", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if spec.alibi is not None:
        scores = scores - torch.from_numpy(spec.alibi).to(q.device)[:, None, None] * distance
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)
