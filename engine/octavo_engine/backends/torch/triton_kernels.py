"""The Triton kernels as one answer to `kernels.Kernels`, with the sizes settled for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo_engine.backends.torch.device_step import WalkCut
from octavo_engine.backends.torch.latent_kernels import LatentKernels
from octavo_engine.backends.torch.packed import ALL_FORMATS, GroupedWeight
from octavo_engine.backends.torch.triton import (
    adapters,
    attention,
    decode,
    draw,
    experts,
    few,
    gemv,
    grouped,
    heads,
    matmul,
    pages,
    prompts,
    routing,
    rows,
    scaled,
)
from octavo_engine.backends.torch.triton.scans import TritonScans

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.torch.cuda_loader import DeviceLinear
    from octavo_engine.backends.torch.device_adapters import Arenas, DeviceSite
    from octavo_engine.backends.torch.device_step import DeviceStep, DrawParams
    from octavo_engine.backends.torch.flashinfer import FlashInferAttention
    from octavo_engine.backends.torch.head_shape import HeadShape
    from octavo_engine.backends.torch.operands import (
        ExpertPair,
        LatentOperands,
        LayerKV,
        PageMoves,
    )
    from octavo_engine.backends.torch.packed import Format
    from octavo_engine.models.config import ExpertsConfig
    from octavo_engine.models.latent_config import LatentConfig
    from octavo_engine.ops import Activation, AttentionSpec, ExpertsSpec, LatentAttentionSpec

FP8_CAPABILITY = (
    8,
    9,
)  # the first NVIDIA matrix units that know e4m3; AMD's before MI350 know another
PARTS_PER_PROCESSOR = 2  # of the contexts of single tokens, each with one head of keys
INVARIANT_SPLIT_TOKENS = 1024  # a fixed cut of a context gives the same sums in any company


class TritonKernels:
    """Launches; decides only how the work is cut."""

    name = "triton"
    can_capture = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: HeadShape,
        *,
        batch_invariant: bool = False,
        prompts: FlashInferAttention | None = None,
        latent: LatentConfig | None = None,
    ) -> None:
        """`prompts` attends in steps that are not of single tokens, if given."""
        self._prompts = prompts
        # Long prompts depend on the company: they are attended to otherwise than short ones.
        self._gathers = prompts is None and not batch_invariant and dtype.itemsize == 2
        self._gathers = self._gathers and latent is None
        self._gathers = self._gathers and _copies_blocks(device)
        self._itemsize = dtype.itemsize
        group = shape.num_heads // shape.num_kv_heads
        dim, itemsize = shape.head_dim, dtype.itemsize
        self._tile = attention.choose_tile(group=group, head_dim=dim, itemsize=itemsize)
        self._walk_tile = decode.choose_tile(head_dim=dim, itemsize=itemsize)
        # Of a KV cache in eight bits; as many rows.
        self._scaled_tile = attention.choose_tile(
            group=group, head_dim=dim, itemsize=itemsize, has_scales=True
        )
        self._scaled_walk_tile = decode.choose_tile(
            head_dim=dim, itemsize=itemsize, has_scales=True
        )
        self._group = group
        self._shape = shape
        self._batch_invariant = batch_invariant
        self.formats = _formats(device)
        self._device = device
        self._alibi: dict[int, tuple[NDArray[np.float32], Tensor]] = {}  # by id, which is kept
        self.scans = TritonScans(batch_invariant=batch_invariant)
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 4
        )
        # NOTE: one kernel for all tokens when results must not depend on company: a token may be
        # alone in one step and within a prompt in another.
        self.walks = WalkCut()
        if not batch_invariant:
            parts = PARTS_PER_PROCESSOR * self._num_processors // shape.num_kv_heads
            self.walks = WalkCut(max(1, parts), shape.num_heads)
        self._latent: LatentKernels | None = None
        if latent is not None:
            self._latent = LatentKernels(
                latent, dtype, shape.num_heads, num_processors=self._num_processors,
                split_tokens=INVARIANT_SPLIT_TOKENS if batch_invariant else 0,
            )  # fmt: skip
            self.walks = self._latent.walks

    @property
    def batch_invariant(self) -> bool:
        return self._batch_invariant

    @property
    def can_capture_prompts(self) -> bool:
        return self._prompts is None  # who plans on the host

    @property
    def has_one_table(self) -> bool:
        return self._prompts is not None  # whose plans are made once for all layers of a kind

    @property
    def reads_scales(self) -> bool:
        return self._prompts is None

    def workspace_bytes(self, limits: BackendLimits) -> int:
        if self._latent is not None:
            return self._latent.workspace_bytes(limits)
        size = {"part_rows": self._tile.block_m, "head_dim": self._shape.head_dim}
        if not self._batch_invariant:  # at most two programs for each processor leave parts
            programs = 2 * self._num_processors
            split = attention.plan_parts(num_tiles=1, num_kv_heads=1, num_splits=programs, **size)
            walked = decode.parts_bytes(
                num_parts=limits.max_seqs + self.walks.spare_parts,
                num_heads=self._shape.num_heads, head_dim=self._shape.head_dim,
            )  # fmt: skip
            most = max(split.num_bytes, walked)
            if self._gathers and limits.max_tokens >= prompts.MIN_TOKENS:
                most += prompts.gathered_bytes(
                    max_seq_len=limits.max_model_len, num_kv_heads=self._shape.num_kv_heads,
                    head_dim=self._shape.head_dim, itemsize=self._itemsize,
                )  # fmt: skip
            return most
        return attention.plan_parts(
            num_tiles=limits.max_tokens + limits.max_seqs,  # if each one's last is partly filled
            num_kv_heads=self._shape.num_kv_heads,
            num_splits=-(-limits.max_model_len // INVARIANT_SPLIT_TOKENS),
            **size,
        ).num_bytes

    def wide_tokens(self, experts: ExpertsConfig) -> int:
        return -(-routing.FEW_PER_EXPERT * experts.num_experts // experts.top_k)

    def walks_few(self, width: int) -> bool:
        return bool(self.walks.num_heads) and few.rows_of(self._group, width) <= few.MOST_ROWS

    def few_bytes(self, num_tokens: int, width: int) -> int:
        if not self.walks_few(width):
            return 0
        return few.parts_bytes(
            num_parts=num_tokens + self.walks.spare_parts, width=width,
            num_heads=self._shape.num_heads, head_dim=self._shape.head_dim,
        )  # fmt: skip

    @property
    def long_tokens(self) -> int:
        return prompts.MIN_TOKENS if self._gathers else 0

    @property
    def tokens_per_tile(self) -> int:
        if self._latent is not None:
            return self._latent.tile.tokens_per_tile
        return self._tile.block_m // self._group

    def linear(self, x: Tensor, weight: DeviceLinear) -> Tensor:
        dtype = torch.float32 if weight.is_head else x.dtype
        if isinstance(weight.weight, torch.Tensor):
            if not self._batch_invariant:
                if len(x) == 1 and x.dtype.itemsize == 2:
                    return gemv.matmul(x.contiguous(), weight.weight, weight.bias, dtype)
                return weight.apply(x)  # cuBLAS
            return matmul.matmul(x.contiguous(), weight.weight, weight.bias, dtype)
        processors, invariant = self._num_processors, self._batch_invariant
        if isinstance(weight.weight, GroupedWeight):
            return grouped.matmul(
                x, weight.weight, weight.bias, dtype,
                num_processors=processors, batch_invariant=invariant,
            )  # fmt: skip
        return scaled.matmul(
            x, weight.weight, weight.bias, dtype,
            num_processors=processors, batch_invariant=invariant,
        )  # fmt: skip

    def add_adapters(
        self, y: Tensor, x: Tensor, site: DeviceSite, arenas: Arenas, step: DeviceStep
    ) -> None:
        adapters.add_adapters(y, x.contiguous(), site, arenas, step)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        return rows.rms_norm(x, weight, eps, out_dtype)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, scale: float, weight: Tensor, eps: float, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return rows.add_rms_norm(x, y, scale, weight, eps, out_dtype)

    def glu(self, x: Tensor, activation: Activation) -> Tensor:
        return rows.glu(x, activation)

    def experts(self, x: Tensor, scores: Tensor, layers: ExpertPair, spec: ExpertsSpec) -> Tensor:
        gate_up, down = layers
        weights, chosen = routing.route(scores, spec)
        tiles = routing.cut_tiles(chosen, len(gate_up), batch_invariant=self._batch_invariant)
        num_pairs = chosen.numel()
        taken = x.contiguous()
        if spec.weighs_inputs:
            taken = routing.weigh(taken, weights)
        h = self.glu(experts.product(taken, gate_up, tiles, num_pairs), spec.activation)
        h = experts.product(h, down, tiles, num_pairs).view(*chosen.shape, x.shape[1])
        return routing.combine(h, weights, x.dtype, is_weighed=spec.weighs_inputs)

    def turn_and_store(
        self, qkv: Tensor, angles: Tensor | None, kv: LayerKV, step: DeviceStep, spec: AttentionSpec
    ) -> Tensor:
        return heads.turn_and_store(qkv, angles, kv, step, spec)

    def attend(self, q: Tensor, kv: LayerKV, step: DeviceStep, spec: AttentionSpec) -> Tensor:
        if step.width:
            return few.attend(q, kv, step, spec)
        if self._prompts is not None and not step.is_decode:
            return self._prompts.attend(q, kv, step, spec)
        alibi = self._slopes(spec)
        if step.is_decode and not self._batch_invariant:
            walk = self._walk_tile if kv.scales is None else self._scaled_walk_tile
            return decode.attend(q, kv, step, spec, tile=walk, alibi=alibi)
        out = torch.empty_like(q)
        runs = [range(len(step.tile_seqs))]
        gathers = self._gathers and kv.scales is None
        long = prompts.find_long(step, spec, self._itemsize) if gathers else []
        if long:
            prompts.attend(out, q, kv, step, spec, long)
            runs = prompts.tiles_of_others(step, long, self.tokens_per_tile)
        for tiles in runs:
            self._attend_tiles(out, q, kv, step, spec, tiles, alibi)
        return out

    def _attend_tiles(
        self,
        out: Tensor,
        q: Tensor,
        kv: LayerKV,
        step: DeviceStep,
        spec: AttentionSpec,
        tiles: range,
        alibi: Tensor | None,
    ) -> None:
        if self._batch_invariant:
            split_tokens = INVARIANT_SPLIT_TOKENS
            num_splits = -(-step.max_seq_len // split_tokens)
        else:
            split_tokens = 0
            seen = step.max_seq_len if spec.window is None else min(step.max_seq_len, spec.window)
            num_splits = attention.count_splits(
                num_programs=len(tiles) * spec.num_kv_heads,
                max_seq_len=seen,
                num_processors=self._num_processors,
            )
        attention.attend(
            q, kv, step, spec,
            tile=self._tile if kv.scales is None else self._scaled_tile, tiles=tiles, out=out,
            num_splits=num_splits, split_tokens=split_tokens, alibi=alibi,
        )  # fmt: skip

    def _slopes(self, spec: AttentionSpec) -> Tensor | None:
        """Its linear biases on the device. A layer's are sent once, by the warm-up at the latest:
        what a graph holds may not wait for the host."""
        if spec.alibi is None:
            return None
        known = self._alibi.get(id(spec.alibi))
        if known is None:
            slopes = torch.from_numpy(spec.alibi).to(self._device)
            known = self._alibi[id(spec.alibi)] = (spec.alibi, slopes)
        return known[1]

    def latent_attention(
        self, operands: LatentOperands, step: DeviceStep, spec: LatentAttentionSpec
    ) -> Tensor:
        assert self._latent is not None, "the model's config has its sizes"
        return self._latent.attend(operands, step, spec)

    def move_pages(
        self, staging: Tensor, region: Tensor, moves: PageMoves, *, is_save: bool
    ) -> None:
        pages.move_pages(staging, region, moves, is_save=is_save)

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        return draw.draw(logits, params)


def _copies_blocks(device: torch.device) -> bool:
    """Whether there is a copy engine that tensor descriptors are for."""
    if device.type != "cuda":  # the interpreter knows them
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _formats(device: torch.device) -> frozenset[Format]:
    """All but those the device's matrix units do not know."""
    if device.type != "cuda":  # the interpreter knows all
        return ALL_FORMATS
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        return ALL_FORMATS
    return ALL_FORMATS - {"fp8"}
