"""Latent attention in plain torch: what `triton/latent.py` must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import LatentOperands
    from octavo_engine.ops import LatentAttentionSpec


def latent_attention(
    operands: LatentOperands, step: DeviceStep, spec: LatentAttentionSpec
) -> Tensor:
    """As `Kernels.latent_attention`."""
    q, kv, key_up, value_up, cos_sin, cache = operands
    assert step.host is not None, "plain attention needs the step's sizes on the host"
    angles = cos_sin[step.positions.long()]
    latent, key = torch.split(kv.float(), [spec.rank, spec.rope_dim], dim=-1)
    latent = functional.rms_norm(latent, (spec.rank,), spec.kv_norm, spec.norm_eps)
    vectors = torch.cat([latent, _turned(key, angles, spec)], dim=-1).to(cache.dtype)
    kept = step.slots >= 0
    cache.flatten(0, 1)[step.slots[kept].long()] = vectors[kept, None]

    heads = q.view(len(q), spec.num_heads, -1)
    nope, rope = torch.split(heads, [spec.nope_dim, spec.rope_dim], dim=-1)
    absorbed = torch.einsum("thn,hrn->thr", nope, key_up)
    turned = _turned(rope.float(), angles[:, None], spec).to(q.dtype)
    queries = torch.cat([absorbed, turned], dim=-1)
    mixed = torch.empty_like(absorbed)
    for index, length in enumerate(step.host.seq_lens.tolist()):
        own = slice(int(step.host.seq_starts[index]), int(step.host.seq_starts[index + 1]))
        mixed[own] = _attend_one(queries[own], cache, step, spec, index, length)
    return torch.einsum("thr,hvr->thv", mixed, value_up).flatten(1)


def _turned(x: Tensor, angles: Tensor, spec: LatentAttentionSpec) -> Tensor:
    """x by the angles of its tokens. Neighbours that are pairs lie half the columns apart then."""
    cos, sin = angles.chunk(2, dim=-1)
    left, right = (x[..., ::2], x[..., 1::2]) if spec.turns_neighbours else x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _attend_one(
    queries: Tensor,
    cache: Tensor,
    step: DeviceStep,
    spec: LatentAttentionSpec,
    index: int,
    length: int,
) -> Tensor:
    """One sequence's sums of latent vectors, [tokens, heads, rank]."""
    begin, first = length - len(queries), 0
    if spec.window is not None:  # memory before the window may be gone: do not read it
        first = max(0, begin - spec.window + 1)
    first_block, start = first // BLOCK_SIZE, int(step.table_starts[index])
    blocks = step.tables[start + first_block : start - (-length // BLOCK_SIZE)].long()
    seen = slice(first - first_block * BLOCK_SIZE, length - first_block * BLOCK_SIZE)
    vectors = cache[blocks].flatten(0, 1)[seen, 0].float()
    own = torch.arange(begin, length, device=queries.device)[:, None]
    columns = torch.arange(first, length, device=queries.device)
    visible = columns <= own
    if spec.window is not None:
        visible &= columns > own - spec.window
    scores = torch.einsum("thd,sd->ths", queries.float(), vectors) * spec.scale
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    return (weights @ vectors[:, : spec.rank]).to(queries.dtype)
