"""Attention over latent vectors of DeepSeek-V3's shape: a step of single tokens, beside a copy of
the vectors' bytes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from octavo.measure.device_limits import replayed_ms
from octavo_engine.backends.backend import BackendLimits, BackendStep
from octavo_engine.backends.torch.device_kv import DeviceKV
from octavo_engine.backends.torch.device_step import StepBuffer, StepSizes, cut_walks
from octavo_engine.backends.torch.latent_kernels import LatentKernels
from octavo_engine.backends.torch.operands import LatentOperands
from octavo_engine.backends.torch.ropes import DeviceRopeTables
from octavo_engine.backends.torch.triton import latent
from octavo_engine.caches import one_group
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.models.latent_config import LatentConfig
from octavo_engine.ops import LatentAttentionSpec, Rope
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.rows import new_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benchmarks.gpu.measure import Ceilings
    from octavo_engine.backends.torch.device_step import DeviceStep

LAYERS = 4  # in turn, so that what they read is not in the cache
WALKS = {"1_x_512": [512], "1_x_16000": [16000], "64_x_300": [300] * 64}
WIDE_ROWS = 64  # heads of a program, of which the registers of an H100 do not hold all


class Shape(NamedTuple):
    """The attention of one layer."""

    num_heads: int = 128
    config: LatentConfig = LatentConfig(
        rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=None, turns_neighbours=True
    )


def measure(
    best: Ceilings,
    *,
    device: torch.device,
    shape: Shape | None = None,
    walks: dict[str, list[int]] | None = None,
    num_processors: int | None = None,
    timer: Callable[[Sequence[Callable[[], Tensor]]], float] = replayed_ms,
) -> dict[str, float]:
    """Microseconds of walk and join, and of all that a layer does between its projections."""
    shape = shape or Shape()
    if num_processors is None:
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    kernels = LatentKernels(
        shape.config, torch.bfloat16 if device.type == "cuda" else torch.float32, shape.num_heads,
        num_processors=num_processors, split_tokens=0,
    )  # fmt: skip
    found = {}
    for name, lengths in (walks or WALKS).items():
        layers = _Layers(shape, lengths, kernels, device)
        num_bytes = sum(lengths) * shape.config.cache(None).dim * layers.dtype.itemsize
        us = timer(layers.walks(kernels.tile)) * 1e3
        found[f"{name}_us"] = us
        found[f"{name}_copy_us"] = num_bytes / best.bytes_per_s * 1e6
        found[f"{name}_bandwidth_share"] = found[f"{name}_copy_us"] / us
        found[f"{name}_layer_us"] = timer(layers.wholes()) * 1e3
        if shape.num_heads % WIDE_ROWS == 0:
            wide = kernels.tile._replace(group=WIDE_ROWS)
            found[f"{name}_{WIDE_ROWS}_rows_us"] = timer(layers.walks(wide)) * 1e3
    return found


class _Layers:
    """A step of single tokens over caches of random numbers."""

    def __init__(
        self, shape: Shape, lengths: list[int], kernels: LatentKernels, device: torch.device
    ) -> None:
        self.kernels, self.dtype = kernels, kernels.dtype
        self._config, count = shape.config, len(lengths)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        layout = one_group([shape.config.cache(None)] * LAYERS)
        self._kv = DeviceKV(layout, num_blocks=sum(counts), dtype=self.dtype, device=device)
        for data in self._kv._data.values():
            data.normal_()
        self._spec = LatentAttentionSpec(
            layer=0, num_heads=shape.num_heads, nope_dim=shape.config.nope_dim,
            rope=Rope(np.ones(shape.config.rope_dim // 2, np.float32)), rank=shape.config.rank,
            value_dim=shape.config.value_dim, scale=192**-0.5, norm_eps=1e-6,
            kv_norm=torch.ones(shape.config.rank, device=device), turns_neighbours=True,
        )  # fmt: skip
        self._cos_sin = DeviceRopeTables(max(lengths), device).table(self._spec.rope)
        self._step = _step(lengths, counts, kernels, device)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device).to(self.dtype)

        heads, config = shape.num_heads, shape.config
        self._q = drawn(count, heads * (config.nope_dim + config.rope_dim))
        self._new = drawn(count, config.rank + config.rope_dim)
        self._key_up = drawn(heads, config.rank, config.nope_dim)
        self._value_up = drawn(heads, config.value_dim, config.rank)
        self._absorbed = drawn(count, heads, config.rank)
        self._turned = drawn(count, heads, config.rope_dim)

    def walks(self, tile: latent.LatentTile) -> list[Callable[[], Tensor]]:
        return [
            functools.partial(
                latent.walk, self._absorbed, self._turned, self._kv.latents(layer), self._step,
                self._spec, tile=tile,
            )
            for layer in range(LAYERS)
        ]  # fmt: skip

    def wholes(self) -> list[Callable[[], Tensor]]:
        return [
            functools.partial(
                self.kernels.attend,
                LatentOperands(
                    self._q, self._new, self._key_up, self._value_up, self._cos_sin,
                    self._kv.latents(layer),
                ),
                self._step, self._spec,
            )
            for layer in range(LAYERS)
        ]  # fmt: skip


def _step(
    lengths: list[int], counts: list[int], kernels: LatentKernels, device: torch.device
) -> DeviceStep:
    num_seqs, width = len(lengths), max(counts)
    tables = np.zeros((num_seqs, width), np.int32)
    blocks = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    for row, own in enumerate(np.split(blocks, np.cumsum(counts)[:-1])):
        tables[row, : len(own)] = own
    rows, seq_lens = np.arange(num_seqs, dtype=np.int32), np.array(lengths, np.int32)
    last = seq_lens - 1
    step = BackendStep(
        token_ids=np.zeros(num_seqs, np.int32), positions=last,
        slots=(tables[rows, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE)[None],
        seq_starts=np.arange(num_seqs + 1, dtype=np.int32), seq_lens=seq_lens, rows=rows,
        block_tables=tables[None], logit_rows=rows, copies=np.zeros((0, 3), np.int32),
    )  # fmt: skip
    none = np.zeros(num_seqs, np.int32)
    sampling = SamplingBatch(new_table(1), none, none, none - 1, np.zeros((1, 1), np.int32))
    limits = BackendLimits(
        max_tokens=num_seqs, max_seqs=num_seqs, max_logit_rows=num_seqs,
        max_model_len=width * BLOCK_SIZE,
    )  # fmt: skip
    buffer = StepBuffer(limits, device, walks=kernels.walks)
    sizes = StepSizes.of_decode(num_seqs, kernels.walks.spare_parts)
    tiles = cut_walks(seq_lens, kernels.walks.spare_parts)
    buffer.send(buffer.fill(step, sampling, tiles, sizes))
    return buffer.step(sizes, is_decode=True, max_seq_len=max(lengths), host=step)
