"""Attention of one step's calls over paged keys and values, on whatever device they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.torch.fallback.layers import AttentionCall
    from octavo_engine.backends.torch.reference import PagedKV

_MAX_GATHERED = 1 << 16  # tokens of sequences that are padded to one length and computed together
_MAX_SCORES = 1 << 26  # of one piece of a prompt, where they are written out


@dataclass(frozen=True, slots=True)
class _Piece:
    """Sequences computed together: each has as many tokens in the step as the others."""

    tokens: Tensor  # [B, t]  rows of the step's values
    blocks: Tensor  # [B, n]  gathered
    present: Tensor  # [B, n * 16]  what is a token of the sequence that one of its tokens sees
    visible: Tensor  # [B, 1, t, n * 16]


class PagedAttention:
    """Answers the calls of one forward pass over the tokens of a step, laid end to end."""

    def __init__(self, step: BackendStep, kv: PagedKV, layers: Sequence[AttentionCall]) -> None:
        self._step = step
        self._kv = kv
        self._layers = layers
        self._next = 0
        self._device = kv.layers[0].device
        self._slots = torch.from_numpy(step.slots).long().to(self._device)
        self._pieces: dict[tuple[int, int | None], list[_Piece]] = {}

    @property
    def is_done(self) -> bool:
        """Whether each layer has made its call."""
        return self._next == len(self._layers)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, extra: Any
    ) -> Tensor:
        index, self._next = self._next, self._next + 1
        layer, group = self._layers[index], self._kv.groups[index]
        k_cache, v_cache = self._kv.layers[index]
        slots = self._slots[group]
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        k_cache[block, offset, :, : layer.key_dim] = k[0].transpose(0, 1).to(k_cache.dtype)
        v_cache[block, offset, :, : layer.value_dim] = v[0].transpose(0, 1).to(v_cache.dtype)
        result = q.new_empty((q.shape[2], q.shape[1], layer.value_dim))
        for piece in self._pieces_of(group, layer.window):
            absent = ~piece.present[:, :, None, None]  # it may hold anything, NaN too
            keys, values = (
                cache[piece.blocks].flatten(1, 2)[..., :dim].masked_fill(absent, 0).to(q.dtype)
                for cache, dim in ((k_cache, layer.key_dim), (v_cache, layer.value_dim))
            )
            queries = q[0][:, piece.tokens].transpose(0, 1)  # [B, heads, t, columns]
            output = _attend(
                queries,
                keys.transpose(1, 2),
                values.transpose(1, 2),
                piece.visible,
                layer,
                extra.get("s_aux"),
            )
            result[piece.tokens] = output.transpose(1, 2)
        return result[None]

    def _pieces_of(self, group: int, window: int | None) -> list[_Piece]:
        """Prompts one by one, sequences of one token together."""
        key = group, window
        if key not in self._pieces:
            counts = np.diff(self._step.seq_starts)
            prompts = [[int(index)] for index in np.nonzero(counts > 1)[0]]
            single = self._batches(np.nonzero(counts == 1)[0], window)
            self._pieces[key] = [self._piece(rows, group, window) for rows in prompts + single]
        return self._pieces[key]

    def _batches(self, rows: NDArray[np.intp], window: int | None) -> list[list[int]]:
        """Sequences of like lengths together, so that little is padding."""
        lengths = self._step.seq_lens[rows]
        seen = lengths if window is None else np.minimum(lengths, window + BLOCK_SIZE)
        batches: list[list[int]] = []
        longest = 0
        for index in np.argsort(-seen, kind="stable"):
            if not batches or (len(batches[-1]) + 1) * longest > _MAX_GATHERED:
                batches.append([])
                longest = int(seen[index])  # the first of a batch is
            batches[-1].append(int(rows[index]))
        return batches

    def _piece(self, rows: list[int], group: int, window: int | None) -> _Piece:
        step = self._step
        starts = step.seq_starts[rows]
        count = int(step.seq_starts[rows[0] + 1]) - int(starts[0])
        tokens = starts[:, None] + np.arange(count)
        own = step.positions[tokens]  # [B, t]
        lengths = step.seq_lens[rows]
        first = np.zeros(len(rows), np.int64)
        if window is not None:  # memory before the window may be gone: do not read it
            first = np.maximum(0, own[:, 0].astype(np.int64) - window + 1) // BLOCK_SIZE
        num_blocks = int((-(-lengths // BLOCK_SIZE) - first).max())
        numbers = first[:, None] + np.arange(num_blocks)
        tables = step.block_tables[group][step.rows[rows]]
        within = np.minimum(numbers, tables.shape[1] - 1)
        blocks = np.maximum(np.take_along_axis(tables, within, axis=1), 0)
        places = (numbers[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(len(rows), -1)
        distance = own[:, :, None].astype(np.int64) - places[:, None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        return _Piece(
            self._put(tokens),
            self._put(blocks),
            self._put(visible.any(axis=1)),
            self._put(visible[:, None]),
        )

    def _put(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor if array.dtype == np.bool_ else tensor.long()).to(self._device)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, layer: AttentionCall, sinks: Tensor | None
) -> Tensor:
    """[B, heads, t, value_dim]; sinks are a logit for each head that takes weight from the rest."""
    if layer.soft_cap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=layer.scale,
            enable_gqa=layer.num_kv_heads != layer.num_heads,
        )  # fmt: skip
    rows = max(1, _MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    parts = [
        _written_out(q[:, :, at : at + rows], k, v, visible[:, :, at : at + rows], layer, sinks)
        for at in range(0, q.shape[2], rows)
    ]
    return torch.cat(parts, dim=2)


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, layer: AttentionCall, sinks: Tensor | None
) -> Tensor:
    group = layer.num_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v
