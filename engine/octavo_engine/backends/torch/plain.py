"""Plain torch for everything: what Triton's kernels must equal, on any device torch knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from octavo_engine.backends.torch.activations import activate
from octavo_engine.backends.torch.device_step import WalkCut
from octavo_engine.backends.torch.kv_format import narrow_rows, widen_blocks
from octavo_engine.backends.torch.packed import ALL_FORMATS, expert_product
from octavo_engine.backends.torch.plain_adapters import add_adapters
from octavo_engine.backends.torch.plain_draw import draw
from octavo_engine.backends.torch.plain_latent import latent_attention
from octavo_engine.backends.torch.scans import PlainScans
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.torch.cuda_loader import DeviceLinear
    from octavo_engine.backends.torch.device_adapters import Arenas, DeviceSite
    from octavo_engine.backends.torch.device_step import DeviceStep, DrawParams
    from octavo_engine.backends.torch.operands import (
        ExpertPair,
        LatentOperands,
        LayerKV,
        PageMoves,
    )
    from octavo_engine.models.config import ExpertsConfig
    from octavo_engine.ops import Activation, AttentionSpec, ExpertsSpec, LatentAttentionSpec


class PlainKernels:
    """Answers to `kernels.Kernels`. Looks at sizes on the host, so it cannot be captured."""

    name = "plain"
    can_capture = can_capture_prompts = batch_invariant = False
    has_one_table = False
    reads_scales = True
    formats = ALL_FORMATS
    scans = PlainScans()
    walks = WalkCut()
    tokens_per_tile = BLOCK_SIZE  # there are no tiles here

    def workspace_bytes(self, limits: BackendLimits) -> int:
        return 0

    def wide_tokens(self, experts: ExpertsConfig) -> int:
        return 0

    long_tokens = 0

    def walks_few(self, width: int) -> bool:
        return False

    def few_bytes(self, num_tokens: int, width: int) -> int:
        return 0

    def linear(self, x: Tensor, weight: DeviceLinear) -> Tensor:
        return weight.apply(x)

    def add_adapters(
        self, y: Tensor, x: Tensor, site: DeviceSite, arenas: Arenas, step: DeviceStep
    ) -> None:
        add_adapters(y, x, site, arenas, step)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        return _norm(x.float(), weight, eps).to(out_dtype)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, scale: float, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total = (x.float() + scale * y.float()).to(x.dtype)
        return total, _norm(total.float(), weight, eps).to(out_dtype)

    def glu(self, x: Tensor, activation: Activation) -> Tensor:
        left, right = x.float().chunk(2, dim=-1)
        if activation == "swiglu_clamped":
            gate, up = left.clamp(max=7.0), right.clamp(-7.0, 7.0)
            return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(x.dtype)
        return (activate(left, activation) * right).to(x.dtype)

    def experts(self, x: Tensor, scores: Tensor, layers: ExpertPair, spec: ExpertsSpec) -> Tensor:
        gate_up, down = layers
        weights, chosen = choose_experts(scores, spec)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(gate_up)):
            tokens, places = torch.nonzero(chosen == expert, as_tuple=True)
            own, taken = weights[tokens, places, None], x[tokens]
            if spec.weighs_inputs:
                taken = (taken.float() * own).to(x.dtype)
            h = self.glu(expert_product(taken, gate_up, expert), spec.activation)
            h = expert_product(h, down, expert).float()
            out.index_add_(0, tokens, h if spec.weighs_inputs else own * h)
        return out.to(x.dtype)

    def turn_and_store(
        self, qkv: Tensor, angles: Tensor | None, kv: LayerKV, step: DeviceStep, spec: AttentionSpec
    ) -> Tensor:
        k_cache, v_cache, scales = kv
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        heads = qkv.view(len(qkv), sum(sizes), spec.head_dim)
        q, k, v = torch.split(heads, sizes, dim=1)
        q, k = q.float(), k.float()
        if not spec.norm_after_rope:
            q, k = norm_heads(q, spec.q_norm, spec), norm_heads(k, spec.k_norm, spec)
        if angles is not None:
            own = angles[step.positions.long()][:, None]
            q, k = _turn(q, own), _turn(k, own)
        if spec.norm_after_rope:
            q, k = norm_heads(q, spec.q_norm, spec), norm_heads(k, spec.k_norm, spec)
        if spec.temperature is not None:
            steps = torch.floor((step.positions.double() + 1) / spec.temperature.floor)
            q = q * (1 + spec.temperature.scale * steps.log1p()).float()[:, None, None]
        kept = step.slots >= 0
        slots = step.slots[kept].long()
        if scales is None:
            k_cache.flatten(0, 1)[slots] = k[kept].to(k_cache.dtype)
            v_cache.flatten(0, 1)[slots] = v[kept].to(v_cache.dtype)
        else:
            blocks, places = slots // BLOCK_SIZE, slots % BLOCK_SIZE
            for rows, cache, own in ((k, k_cache, scales[0]), (v.float(), v_cache, scales[1])):
                narrowed, row_scales = narrow_rows(rows[kept])
                cache.view(torch.uint8).flatten(0, 1)[slots] = narrowed.view(torch.uint8)
                own[blocks, :, places] = row_scales
        turned: Tensor = q.to(qkv.dtype).flatten(1)
        return turned

    def attend(self, q: Tensor, kv: LayerKV, step: DeviceStep, spec: AttentionSpec) -> Tensor:
        assert step.host is not None, "plain attention needs the step's sizes on the host"
        out = torch.empty_like(q)
        for index in range(len(step.host.seq_lens)):
            own = slice(int(step.host.seq_starts[index]), int(step.host.seq_starts[index + 1]))
            length = int(step.host.seq_lens[index])
            out[own] = _attend_one(q[own], kv, step, spec, index, length)
        return out

    def latent_attention(
        self, operands: LatentOperands, step: DeviceStep, spec: LatentAttentionSpec
    ) -> Tensor:
        return latent_attention(operands, step, spec)

    def move_pages(
        self, staging: Tensor, region: Tensor, moves: PageMoves, *, is_save: bool
    ) -> None:
        block_ids, slots, first = moves
        num_rows, _, width = region.shape
        kept = block_ids >= 0
        blocks, places = block_ids[kept].long(), slots[kept].long()
        end = first + num_rows * width
        if is_save:
            staging[places, first:end] = region[:, blocks].transpose(0, 1).flatten(1)
        else:
            pages = staging[places, first:end].view(len(places), num_rows, width)
            region[:, blocks] = pages.transpose(0, 1)

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        return draw(logits, params)


def choose_experts(scores: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor]:
    """The weights of each row's best experts, and these, [T, top_k] both; of equals the first."""
    scores = scores.float()
    shares = torch.sigmoid(scores) if spec.is_sigmoid else scores.softmax(-1)
    choice = shares if spec.bias is None else shares + spec.bias
    if spec.top_groups < spec.num_groups:
        groups = choice.view(len(choice), spec.num_groups, -1)
        best = groups.topk(min(spec.best_of_group, groups.shape[-1]), dim=-1).values.sum(-1)
        is_open = torch.zeros_like(best, dtype=torch.bool)
        is_open.scatter_(1, _first_of_best(best, spec.top_groups), True)
        choice = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    chosen = _first_of_best(choice, spec.top_k)
    weights = shares.gather(1, chosen)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * spec.scale, chosen


def _first_of_best(values: Tensor, count: int) -> Tensor:
    """Where each row's largest values are, the first of equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def norm_heads(x: Tensor, weight: Tensor | None, spec: AttentionSpec) -> Tensor:
    """[T, heads, head_dim] by a weight for one head's columns or for all heads'."""
    if weight is None:
        return x
    if spec.norm == "row":
        return _norm(x.flatten(1), weight, spec.norm_eps).view(x.shape)
    weight = weight.view(-1, spec.head_dim)
    if spec.norm == "layer":
        return functional.layer_norm(x, x.shape[-1:], eps=spec.norm_eps) * weight
    return _norm(x, weight, spec.norm_eps)


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    half = angles.shape[-1] // 2
    cos, sin = torch.split(angles, half, dim=-1)
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


def _read_blocks(
    cache: Tensor, scales: Tensor | None, blocks: Tensor, dtype: torch.dtype
) -> Tensor:
    """[tokens, kv heads, head_dim]"""
    if scales is None:
        return cache[blocks].flatten(0, 1)
    values = cache.view(torch.uint8)[blocks].view(cache.dtype)
    return widen_blocks(values, scales[blocks], dtype).flatten(0, 1)


def _attend_one(
    q: Tensor,
    kv: LayerKV,
    step: DeviceStep,
    spec: AttentionSpec,
    index: int,
    length: int,
) -> Tensor:
    """One sequence's tokens by torch's own attention where it can, in float32 where it cannot."""
    count = len(q)
    first = 0
    if spec.window is not None:  # memory before the window may be gone: do not read it
        begin = length - count
        first = max(0, begin - spec.window + 1)
        if spec.is_chunked:
            first = begin // spec.window * spec.window
    first_block, num_blocks = first // BLOCK_SIZE, -(-length // BLOCK_SIZE)
    start = int(step.table_starts[index])
    blocks = step.tables[start + first_block : start + num_blocks].long()
    seen = slice(first - first_block * BLOCK_SIZE, length - first_block * BLOCK_SIZE)
    k, v = (
        _read_blocks(cache, None if kv.scales is None else kv.scales[side], blocks, q.dtype)[seen]
        for side, cache in enumerate((kv.k, kv.v))
    )
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [kv heads, tokens, head_dim]
    heads = q.view(count, spec.num_heads, spec.head_dim).transpose(0, 1)
    own = torch.arange(length - count, length, device=q.device)[:, None]
    columns = torch.arange(first, length, device=q.device)
    visible = columns <= own
    if spec.window is not None:
        if spec.is_chunked:
            visible &= columns >= own // spec.window * spec.window
        else:
            visible &= columns > own - spec.window
    if spec.alibi is None and spec.soft_cap is None and spec.sinks is None:
        result = functional.scaled_dot_product_attention(
            heads[None], k[None], v[None], attn_mask=visible, scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )[0]  # fmt: skip
    else:
        result = _attend_by_scores(heads, k, v, visible, columns - own, spec)
    return result.transpose(0, 1).flatten(1)


def _attend_by_scores(
    heads: Tensor, k: Tensor, v: Tensor, visible: Tensor, distance: Tensor, spec: AttentionSpec
) -> Tensor:
    """All by [heads, tokens, …], in float32: what becomes of scores torch's own does not know."""
    group = spec.num_heads // spec.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=0).float() for x in (k, v))
    scores = heads.float() @ k.transpose(1, 2) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if spec.alibi is not None:
        slopes = torch.from_numpy(spec.alibi).to(heads.device)
        scores = scores + slopes[:, None, None] * distance
    scores = scores.masked_fill(~visible, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : v.shape[1]]
    return (weights @ v).to(heads.dtype)
