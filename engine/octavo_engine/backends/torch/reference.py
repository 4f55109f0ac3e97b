"""The operations in plain torch, slow and obvious: what the fast ones must equal."""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from octavo_engine.backends.torch.activations import activate
from octavo_engine.backends.torch.rank_group import CutTable
from octavo_engine.caches import LatentSpec
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.ops import HIDDEN, STATE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Literal

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.torch.loader import TorchExperts, TorchHeads, TorchLinear
    from octavo_engine.backends.torch.precision import Precision
    from octavo_engine.backends.torch.rank_group import Cuts, RankGroup
    from octavo_engine.caches import CacheLayout, PagedSpec
    from octavo_engine.ops import (
        Activation,
        AttentionSpec,
        CrossSpec,
        ExpertsSpec,
        LatentAttentionSpec,
        Rope,
    )


class PagedKV:
    """K and V of all layers in blocks of 16 tokens; a block is one group's at a time."""

    def __init__(self, layout: CacheLayout, num_blocks: int, dtype: torch.dtype) -> None:
        places = layout.places()
        sizes: dict[int, int] = {}
        for spec, place in layout.paged():
            sizes[place.region] = max(sizes.get(place.region, 0), block_values(spec))
        self._regions = {
            region: torch.zeros((num_blocks, size), dtype=dtype) for region, size in sizes.items()
        }
        self.groups = [place.group for place in places]
        # Of each paged layer: [2 (K, V), blocks, 16, KV heads, head_dim], latent ones
        # [1, …, 1, dim].
        self.layers: list[Tensor] = []
        self.ordinals = layout.ordinals()
        for spec, place in layout.paged():
            region = self._regions[place.region]
            parts, heads, dim = _sides(spec)
            shape = (parts, num_blocks, BLOCK_SIZE, heads, dim)
            strides = (BLOCK_SIZE * heads * dim, region.shape[1], heads * dim, dim, 1)
            self.layers.append(region.as_strided(shape, strides))

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        for layer in self.layers:  # of other groups too: what they copy is not valid anywhere
            layer[:, target, :num_tokens] = layer[:, source, :num_tokens]

    def poison(self, block_ids: list[int]) -> None:
        for region in self._regions.values():
            region[block_ids] = torch.nan

    def save(self, block_id: int) -> NDArray[np.uint8]:
        parts = [region[block_id].view(torch.uint8) for region in self._regions.values()]
        return torch.cat(parts).numpy()

    def load(self, block_id: int, page: NDArray[np.uint8]) -> None:
        data = torch.from_numpy(page.copy())
        start = 0
        for region in self._regions.values():
            part = region[block_id].view(torch.uint8)
            part.copy_(data[start : start + len(part)])
            start += len(part)


def block_values(spec: PagedSpec) -> int:
    """Numbers that a layer has in a block."""
    parts, heads, dim = _sides(spec)
    return parts * BLOCK_SIZE * heads * dim


def _sides(spec: PagedSpec) -> tuple[int, int, int]:
    """Vectors that a head keeps of a token, heads, and their width."""
    if isinstance(spec, LatentSpec):
        return 1, 1, spec.dim
    return 2, spec.num_kv_heads, spec.head_dim


class CrossStep(NamedTuple):
    """What a step of a model with an encoder has besides."""

    memory: Tensor  # [layers, 2 (K, V), slots, length, heads, head_dim]
    slots: list[int]  # of each sequence
    features: Tensor | None = None  # [T, columns], of the encoder's pass


class TorchPart(NamedTuple):
    """What an adapter adds to some of a linear layer's outputs."""

    columns: slice
    down: Tensor  # [rank, in]
    up: Tensor  # [columns, rank]
    scale: float


TorchAdapter: TypeAlias = "dict[int, list[TorchPart]]"  # by site


class ReferenceOps:
    """Ops over one step."""

    def __init__(
        self,
        step: BackendStep,
        kv: PagedKV,
        precision: Precision,
        adapters: Mapping[int, TorchAdapter] = MappingProxyType({}),
        cross: CrossStep | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """`adapters` by slot; `ranks` compute the step together."""
        self._ranks = ranks
        self._cross = cross
        self._step = step
        self._kv = kv
        self._precision = precision
        self._token_ids = torch.from_numpy(step.token_ids).long()
        self._positions = torch.from_numpy(step.positions)
        self._slots = torch.from_numpy(step.slots).long()
        self._logit_rows = torch.from_numpy(step.logit_rows).long()
        self._adapters = adapters
        self._inputs: Tensor | None = None
        if step.input_rows is not None and step.inputs is not None:
            self._input_rows = torch.from_numpy(step.input_rows).long()
            self._inputs = torch.from_numpy(step.inputs)
        self._rope_positions: Tensor | None = None  # [3, T]
        if step.rope_positions is not None:
            self._rope_positions = torch.from_numpy(step.rope_positions)
        self.kept: dict[str, Tensor] = {}
        self.wanted: Collection[str] = (HIDDEN, STATE)  # what is kept
        self._row_slots: Tensor | None = None  # of the rows of values, as far as it got
        if step.adapters is not None:
            counts = np.diff(step.seq_starts)
            self._row_slots = torch.from_numpy(np.repeat(step.adapters, counts))

    def embedding(self, table: Tensor | CutTable, *, scale: float = 1.0) -> Tensor:
        x = self._look_up(table, self._token_ids) * scale
        if self._inputs is None:
            return x
        is_input = (self._input_rows >= 0)[:, None]
        return torch.where(is_input, self._picture_rows(x, 0), x)

    def add_picture_rows(self, x: Tensor, index: int) -> Tensor:
        if self._inputs is None:
            return x
        is_input = (self._input_rows >= 0)[:, None]
        return torch.where(is_input, x + self._picture_rows(x, index), x)

    def _picture_rows(self, x: Tensor, index: int) -> Tensor:
        assert self._inputs is not None
        rows = self._inputs[self._input_rows.clamp(min=0)]
        columns = x.shape[1]
        return rows[:, index * columns : (index + 1) * columns].to(x.dtype)

    def table(
        self, table: Tensor | CutTable, of: Literal["positions", "types"], *, offset: int = 0
    ) -> Tensor:
        assert of == "positions", "texts of a pair are of models that pool"
        return self._look_up(table, self._positions.long() + offset)

    def _look_up(self, table: Tensor | CutTable, ids: Tensor) -> Tensor:
        if not isinstance(table, CutTable):
            return table[ids]
        assert self._ranks is not None, "only ranks have parts"
        return self._ranks.look_up(table, ids)

    def _whole(self, own: Tensor, cuts: Cuts | None) -> Tensor:
        """All columns of what the ranks have in parts."""
        if cuts is None:
            return own
        assert self._ranks is not None, "only ranks have parts"
        return self._ranks.gather(own, cuts)

    def linear(self, x: Tensor, weight: TorchLinear) -> Tensor:
        y = functional.linear(self._precision.stored(x), weight.weight, weight.bias)
        if self._row_slots is None or weight.site < 0:
            return self._whole(y, weight.cuts)
        for slot, adapter in self._adapters.items():
            rows = torch.nonzero(self._row_slots == slot)[:, 0]
            for part in adapter.get(weight.site, ()):
                shrunken = functional.linear(self._precision.stored(x[rows]), part.down)
                y[rows, part.columns] += part.scale * functional.linear(shrunken, part.up)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        normed = normed if weight is None else normed * weight
        return normed if bias is None else normed + bias

    def glu(self, x: Tensor, activation: Activation) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        if activation == "swiglu_clamped":
            gate, up = left.clamp(max=7.0), right.clamp(-7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return self.activation(left, activation) * right

    def experts(
        self,
        x: Tensor,
        scores: Tensor,
        gate_up: TorchExperts,
        down: TorchExperts,
        spec: ExpertsSpec,
    ) -> Tensor:
        shares, chosen = choose_experts(scores, spec)
        out = torch.zeros_like(x)
        for expert, (wide, narrow) in enumerate(zip(gate_up.weights, down.weights, strict=True)):
            tokens, places = torch.nonzero(chosen == expert, as_tuple=True)
            wide_bias = None if gate_up.bias is None else gate_up.bias[expert]
            narrow_bias = None if down.bias is None else down.bias[expert]
            own = shares[tokens, places, None]
            taken = x[tokens] * own if spec.weighs_inputs else x[tokens]
            h = functional.linear(self._precision.stored(taken), wide, wide_bias)
            h = self._precision.stored(self.glu(h, spec.activation))
            h = functional.linear(h, narrow, narrow_bias)
            out.index_add_(0, tokens, h if spec.weighs_inputs else own * h)
        return out

    def multiply(self, x: Tensor, y: Tensor, activation: Activation | None = None) -> Tensor:
        return x * (y if activation is None else self.activation(y, activation))

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        return activate(x, activation)

    def add(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + scale * y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def gate(self, x: Tensor, scores: Tensor) -> Tensor:
        return x * torch.sigmoid(scores)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap)

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    def select_rows(self, x: Tensor) -> Tensor:
        return x[self._logit_rows]

    def keep(self, name: str, x: Tensor) -> Tensor:
        if name in self.wanted:
            self.kept[name] = x
        return x

    def attention(self, qkv: Tensor, spec: AttentionSpec) -> Tensor:
        cuts = None
        if self._ranks is not None:
            if spec.norm == "row" and spec.q_norm is not None:
                qkv, own = self._normed_rows(qkv, spec), self._ranks.heads(spec, is_normed=True)
            else:
                own = self._ranks.heads(spec)
            qkv, spec, cuts = own.of(qkv), own.spec, own.cuts
        return self._whole(self._attention(qkv, spec), cuts)

    def _normed_rows(self, qkv: Tensor, spec: AttentionSpec) -> Tensor:
        """With q and k normed over all heads' columns, which no rank has alone."""
        assert not spec.norm_after_rope, "norms of rows come before rope"
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        heads = qkv.view(len(qkv), sum(sizes), spec.head_dim)
        q, k, v = torch.split(heads, sizes, dim=1)
        q, k = self._normed(q, spec.q_norm, spec), self._normed(k, spec.k_norm, spec)
        return torch.cat([q, k, v], dim=1).flatten(1)

    def _attention(self, qkv: Tensor, spec: AttentionSpec) -> Tensor:
        q, k, v = self._heads(qkv, spec)
        slots = self._slots[self._kv.groups[spec.layer]]
        k_cache, v_cache = self._kv.layers[self._kv.ordinals[spec.layer]].unbind()
        k_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = self._precision.stored(k)
        v_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = self._precision.stored(v)
        outputs = [
            self._attend(q, index, spec) for index in range(len(self._step.seq_lens))
        ]  # tokens lie in the order of their sequences
        return torch.cat(outputs) if outputs else q.flatten(1)

    def encoder_attention(self, qkv: Tensor, spec: AttentionSpec) -> Tensor:
        """Of whole sequences without rope, as encoders of features are."""
        outputs = []
        for begin, end in self._own():
            q, k, v = self._heads(qkv[begin:end], spec)
            outputs.append(self._attend_all(q, self._precision.stored(k), v, spec.scale))
        return torch.cat(outputs)

    def features(self, columns: int) -> Tensor:
        assert self._cross is not None and self._cross.features is not None
        return self._cross.features

    def shift_rows(self, x: Tensor) -> Tensor:
        shifted = x.roll(1, 0)
        shifted[self._positions == 0] = 0
        return shifted

    def store_cross(self, kv: Tensor, spec: CrossSpec) -> None:
        assert self._cross is not None
        heads = self._precision.stored(kv.view(len(kv), 2, spec.num_heads, spec.head_dim))
        for slot, (begin, end) in zip(self._cross.slots, self._own(), strict=True):
            positions = self._positions[begin:end].long()
            self._cross.memory[spec.layer, :, slot, positions] = heads[begin:end].transpose(0, 1)

    def cross_attention(self, q: Tensor, spec: CrossSpec) -> Tensor:
        assert self._cross is not None
        outputs = []
        for slot, (begin, end) in zip(self._cross.slots, self._own(), strict=True):
            k, v = self._cross.memory[spec.layer, :, slot]
            own = q[begin:end].view(-1, spec.num_heads, spec.head_dim)
            outputs.append(self._attend_all(own, k, v, spec.scale))
        return torch.cat(outputs)

    def _own(self) -> list[tuple[int, int]]:
        """The rows of each sequence."""
        starts = self._step.seq_starts.tolist()
        return list(pairwise(starts))

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rounded = self._precision.multiplied
        scores = torch.einsum("thd,shd->hts", rounded(q), k) * scale
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        values = torch.einsum("hts,shd->thd", rounded(weights), self._precision.stored(v))
        return (values / weights.sum(-1).T[..., None]).flatten(1)

    def _heads(self, qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [T, heads, head_dim], normed and rotated as the spec says."""
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        heads = qkv.view(len(qkv), sum(sizes), spec.head_dim)
        q, k, v = torch.split(heads, sizes, dim=1)
        if not spec.norm_after_rope:
            q, k = self._normed(q, spec.q_norm, spec), self._normed(k, spec.k_norm, spec)
        if spec.rope is not None:
            q, k = self._rotate(q, spec.rope), self._rotate(k, spec.rope)
        if spec.norm_after_rope:
            q, k = self._normed(q, spec.q_norm, spec), self._normed(k, spec.k_norm, spec)
        if spec.temperature is not None:
            steps = torch.floor((self._positions.double() + 1) / spec.temperature.floor)
            q = q * (1 + spec.temperature.scale * steps.log1p()).to(q.dtype)[:, None, None]
        return q, k, v

    def _normed(self, x: Tensor, weight: Tensor | None, spec: AttentionSpec) -> Tensor:
        """Heads, [T, heads, head_dim], by a weight for one head's columns or for all heads'."""
        if weight is None:
            return x
        if spec.norm == "row":
            return self.rms_norm(x.flatten(1), weight, spec.norm_eps).view(x.shape)
        weight = weight.view(-1, spec.head_dim)
        if spec.norm == "layer":
            return self.layer_norm(x, weight, None, spec.norm_eps)
        return self.rms_norm(x, weight, spec.norm_eps)

    def _rotate(self, x: Tensor, rope: Rope) -> Tensor:
        # Angles in float32 whatever the precision: they are part of what a rope is.
        positions = self._positions[:, None]
        if rope.sections is not None and self._rope_positions is not None:
            axes = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
            if rope.is_interleaved:
                axes = torch.zeros_like(axes)
                for axis in (1, 2):
                    axes[axis : 3 * rope.sections[axis] : 3] = axis
            positions = self._rope_positions[axes].T  # [T, rotary_dim / 2]
        angles = positions.float() * torch.from_numpy(rope.inv_freq)
        cos = (angles.cos() * rope.attention_factor).to(x.dtype)[:, None]  # [T, 1, rotary_dim / 2]
        sin = (angles.sin() * rope.attention_factor).to(x.dtype)[:, None]
        half = cos.shape[-1]
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)

    def _context(
        self, index: int, layer: int, window: int | None, *, is_chunked: bool = False
    ) -> tuple[slice, Tensor, Tensor, slice]:
        """Of one sequence: its tokens in the step; the positions that they may see, and where these
        are: their blocks, and the slots within them."""
        step = self._step
        own = slice(int(step.seq_starts[index]), int(step.seq_starts[index + 1]))
        length, first = int(step.seq_lens[index]), 0
        if window is not None:  # memory before the window may be gone: do not read it
            begin = int(self._positions[own].min())
            first = begin // window * window if is_chunked else max(0, begin - window + 1)
        table = step.block_tables[self._kv.groups[layer], step.rows[index]]
        first_block = first // BLOCK_SIZE
        blocks = torch.from_numpy(table[first_block : -(-length // BLOCK_SIZE)]).long()
        seen = slice(first - first_block * BLOCK_SIZE, length - first_block * BLOCK_SIZE)
        return own, torch.arange(first, length), blocks, seen

    def _attend(self, q: Tensor, index: int, spec: AttentionSpec) -> Tensor:
        """The outputs of one sequence's tokens, [tokens, num_heads * head_dim]."""
        step = self._step
        own, positions, blocks, seen = self._context(
            index, spec.layer, spec.window, is_chunked=spec.is_chunked
        )
        own_positions = self._positions[own]
        group = spec.num_heads // spec.num_kv_heads
        k_cache, v_cache = self._kv.layers[self._kv.ordinals[spec.layer]].unbind()
        k = k_cache[blocks].flatten(0, 1)[seen].repeat_interleave(group, dim=1)
        v = v_cache[blocks].flatten(0, 1)[seen].repeat_interleave(group, dim=1)
        distance = own_positions[:, None] - positions  # [tokens, context]
        visible = distance >= 0
        if step.seen_to is not None:
            visible |= positions < torch.from_numpy(step.seen_to)[own, None]
        if spec.window is not None:
            if spec.is_chunked:
                visible &= positions >= (own_positions // spec.window * spec.window)[:, None]
            else:
                visible &= distance < spec.window
        rounded = self._precision.multiplied
        scores = torch.einsum("thd,shd->hts", rounded(q[own]), k) * spec.scale
        if spec.soft_cap is not None:
            scores = self.soft_cap(scores, spec.soft_cap)
        if spec.alibi is not None:
            scores = scores - torch.from_numpy(spec.alibi)[:, None, None] * distance
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        values = torch.einsum("hts,shd->thd", rounded(weights), v)
        total = weights.sum(-1)
        if spec.sinks is not None:
            total = total + (spec.sinks[:, None] - scores.amax(-1)).exp()
        return (values / total.T[..., None]).flatten(1)

    def latent_attention(
        self,
        q: Tensor,
        kv: Tensor,
        key_up: TorchHeads,
        value_up: TorchHeads,
        spec: LatentAttentionSpec,
    ) -> Tensor:
        stored, rounded = self._precision.stored, self._precision.multiplied
        sizes = [spec.nope_dim, spec.rope_dim]
        nope, turned = torch.split(q.view(len(q), spec.num_heads, sum(sizes)), sizes, dim=-1)
        absorbed = torch.einsum("thn,hrn->thr", stored(nope), key_up.weights)
        queries = rounded(torch.cat([absorbed, self._turn_latent(turned, spec)], dim=-1))
        latent, key = torch.split(kv[:, None], [spec.rank, spec.rope_dim], dim=-1)
        latent = self.rms_norm(latent, spec.kv_norm, spec.norm_eps)
        slots = self._slots[self._kv.groups[spec.layer]]
        (cache,) = self._kv.layers[self._kv.ordinals[spec.layer]]
        cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = stored(
            torch.cat([latent, self._turn_latent(key, spec)], dim=-1)
        )
        outputs = [
            self._attend_latents(queries, index, cache, spec)
            for index in range(len(self._step.seq_lens))
        ]
        mixed = torch.cat(outputs) if outputs else queries[..., : spec.rank]
        return torch.einsum("thr,hvr->thv", stored(mixed), value_up.weights).flatten(1)

    def _turn_latent(self, x: Tensor, spec: LatentAttentionSpec) -> Tensor:
        if spec.turns_neighbours:
            x = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
        return self._rotate(x, spec.rope)

    def _attend_latents(
        self, queries: Tensor, index: int, cache: Tensor, spec: LatentAttentionSpec
    ) -> Tensor:
        """One sequence's sums in latent space, [tokens, heads, rank]."""
        own, positions, blocks, seen = self._context(index, spec.layer, spec.window)
        keys = cache[blocks].flatten(0, 1)[seen, 0]
        distance = self._positions[own][:, None] - positions
        visible = distance >= 0
        if spec.window is not None:
            visible &= distance < spec.window
        scores = torch.einsum("thd,sd->hts", queries[own], keys) * spec.scale
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        sums = torch.einsum(
            "hts,sr->thr", self._precision.multiplied(weights), keys[:, : spec.rank]
        )
        return sums / weights.sum(-1).T[..., None]


class ReferenceDraftOps(ReferenceOps):
    """DraftOps over one step and its states."""

    def __init__(
        self, step: BackendStep, kv: PagedKV, precision: Precision, states: NDArray[np.float32]
    ) -> None:
        super().__init__(step, kv, precision)
        self._states = torch.from_numpy(states).to(precision.dtype)

    def input(self, columns: int, *, first: int = 0) -> Tensor:
        assert first == 0 and self._states.shape[1] == columns
        return self._states


def choose_experts(scores: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, [T, top_k] both."""
    shares = torch.sigmoid(scores) if spec.is_sigmoid else scores.softmax(-1)
    choice = shares if spec.bias is None else shares + spec.bias
    if spec.top_groups < spec.num_groups:
        groups = choice.view(len(choice), spec.num_groups, -1)
        best = groups.topk(min(spec.best_of_group, groups.shape[-1]), dim=-1).values.sum(-1)
        open_groups = torch.zeros_like(best, dtype=torch.bool)
        open_groups.scatter_(1, best.topk(spec.top_groups, dim=-1).indices, True)
        choice = groups.masked_fill(~open_groups[..., None], -torch.inf).flatten(1)
    chosen = choice.topk(spec.top_k, dim=-1).indices
    weights = shares.gather(1, chosen)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * spec.scale, chosen
