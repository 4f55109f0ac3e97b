"""Latent attention as Triton's kernels compute it on a device: how it is cut, and what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.torch.device_step import WalkCut
from octavo_engine.backends.torch.triton import attention, latent

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo_engine.backends.backend import BackendLimits
    from octavo_engine.backends.torch.device_step import DeviceStep
    from octavo_engine.backends.torch.operands import LatentOperands
    from octavo_engine.models.latent_config import LatentConfig
    from octavo_engine.ops import LatentAttentionSpec


class LatentKernels:
    """Launches; decides only how the work is cut."""

    def __init__(
        self,
        config: LatentConfig,
        dtype: torch.dtype,
        num_heads: int,
        *,
        num_processors: int,
        split_tokens: int,
    ) -> None:
        """`split_tokens`: contexts are cut at their multiples alone, whatever the step, so that
        bits depend on nothing else; 0: as keeps the processors busy."""
        self.dtype, self._config = dtype, config
        self._num_heads, self._num_processors = num_heads, num_processors
        self._split_tokens = split_tokens
        self.tile = latent.choose_tile(num_heads=num_heads, itemsize=dtype.itemsize)
        self._num_groups = num_heads // self.tile.group
        self.walks = WalkCut()
        if not split_tokens:
            self.walks = WalkCut(max(1, num_processors // self._num_groups))

    def workspace_bytes(self, limits: BackendLimits) -> int:
        """What a layer takes beside its operands: queries and sums in latent space, and parts."""
        config = self._config
        columns = 2 * config.rank + config.rope_dim + config.value_dim
        values = limits.max_tokens * self._num_heads * columns * self.dtype.itemsize
        row_bytes = (config.rank + 2) * 4  # with its maximum and its sum
        if not self._split_tokens:
            programs = 2 * self._num_processors * self.tile.block_m
            walked = (limits.max_seqs + self.walks.spare_parts) * self._num_heads
            return values + max(programs, walked) * row_bytes
        return (
            values
            + attention.plan_parts(
                num_tiles=limits.max_tokens + limits.max_seqs,
                num_kv_heads=self._num_groups,
                num_splits=-(-limits.max_model_len // self._split_tokens),
                part_rows=self.tile.block_m,
                head_dim=config.rank,
            ).num_bytes
        )

    def attend(
        self, operands: LatentOperands, step: DeviceStep, spec: LatentAttentionSpec
    ) -> Tensor:
        """As `Kernels.latent_attention`."""
        q, kv, key_up, value_up, cos_sin, cache = operands
        is_fixed = self._split_tokens > 0
        if not len(q):
            return q.new_empty((0, spec.num_heads * spec.value_dim))
        turned = latent.store(q, kv, cos_sin, cache, step, spec)
        heads = q.view(len(q), spec.num_heads, spec.nope_dim + spec.rope_dim)
        absorbed = latent.per_head(heads[..., : spec.nope_dim], key_up, batch_invariant=is_fixed)
        if step.is_decode and not is_fixed:
            mixed = latent.walk(absorbed, turned, cache, step, spec, tile=self.tile)
        else:
            mixed = latent.attend(
                absorbed, turned, cache, step, spec, tile=self.tile,
                num_splits=self._num_splits(step, spec), split_tokens=self._split_tokens,
            )  # fmt: skip
        return latent.per_head(mixed, value_up, batch_invariant=is_fixed).flatten(1)

    def _num_splits(self, step: DeviceStep, spec: LatentAttentionSpec) -> int:
        if self._split_tokens:
            return -(-step.max_seq_len // self._split_tokens)
        seen = step.max_seq_len if spec.window is None else min(step.max_seq_len, spec.window)
        return attention.count_splits(
            num_programs=len(step.tile_seqs) * self._num_groups,
            max_seq_len=seen,
            num_processors=self._num_processors,
        )
