"""Recurrent states as the engine launches their kernels: single tokens beside a copy of the bytes
of their states, and a prompt beside the products that its scan needs at least."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.measure.device_limits import replayed_ms
from octavo_engine.backends.backend import BackendLimits, BackendStep, StateStep
from octavo_engine.backends.torch.device_states import DeviceStates
from octavo_engine.backends.torch.device_step import StepBuffer, StepSizes, cut_tiles, cut_walks
from octavo_engine.backends.torch.triton.scans import TritonScans
from octavo_engine.caches import one_group
from octavo_engine.models.recurrent_config import DeltaConfig, MambaConfig
from octavo_engine.ops import ConvSpec, DeltaSpec, SsdSpec
from octavo_engine.sampling.batch import SamplingBatch
from octavo_engine.sampling.rows import new_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benchmarks.gpu.measure import Ceilings
    from octavo_engine.backends.torch.device_step import DeviceStep

# A layer of Mamba 2 of 2.7B, and one of Qwen3-Next-80B-A3B.
LAYERS: dict[str, MambaConfig | DeltaConfig] = {
    "mamba2": MambaConfig(80, 64, 1, 128, 4, True, False, 0.0, float("inf")),
    "delta": DeltaConfig(16, 32, 128, 128, 4),
}
ROWS = (1, 64)
PROMPT = 2048
# What is scanned in turn, so that no layer finds its states in the cache.
ROTATED_BYTES = 256 << 20


def measure(
    best: Ceilings,
    *,
    device: torch.device,
    layers: dict[str, MambaConfig | DeltaConfig] | None = None,
    rows: Sequence[int] = ROWS,
    prompt: int = PROMPT,
    rotated_bytes: int = ROTATED_BYTES,
    timer: Callable[[list[Callable[[], Tensor]]], float] = replayed_ms,
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, config in (layers or LAYERS).items():
        state_bytes = 4 * config.state(0).num_values
        for count in rows:
            copies = max(2, -(-rotated_bytes // (count * state_bytes)))
            ms = timer(_works(config, [1] * count, copies, device))
            found[f"{name}_{count}_us"] = ms * 1e3
            moved = 2 * count * state_bytes / (ms * 1e-3)
            found[f"{name}_{count}_bandwidth_share"] = moved / best.bytes_per_s
        ms = timer(_works(config, [prompt], 4, device))
        found[f"{name}_prompt_us"] = ms * 1e3
        flops = prompt * _flops_per_token(config) / (ms * 1e-3)
        found[f"{name}_prompt_peak_share"] = flops / best.flops_per_s
    return found


def _flops_per_token(config: MambaConfig | DeltaConfig) -> int:
    """Of a scan token by token: the state meets a key, a query, and what is added to it."""
    heads, rows, columns = config.state(0).scan
    return heads * rows * columns * (6 if isinstance(config, DeltaConfig) else 4)


def _works(
    config: MambaConfig | DeltaConfig, counts: list[int], copies: int, device: torch.device
) -> list[Callable[[], Tensor]]:
    """A layer's convolution and scan, over states of so many layers one after the other."""
    step = _step(counts, device)
    states = DeviceStates(one_group([config.state(0)] * copies), len(counts), device)
    kernels = TritonScans(batch_invariant=False)
    random = functools.partial(torch.randn, device=device)
    num_tokens, kernel = sum(counts), config.kernel
    x = random((num_tokens, config.conv_width), dtype=torch.bfloat16)
    weight, bias = random((config.conv_width, 1, kernel)), random(config.conv_width)
    offset = config.state(0).scan_offset

    def layer(index: int) -> Callable[[], Tensor]:
        conv = ConvSpec(index, kernel, weight, bias, "silu")
        if isinstance(config, MambaConfig):
            heads = config.num_heads
            a_log, d, dt_bias = random((3, heads)).unbind()
            ssd = SsdSpec(
                index, offset, heads, config.head_dim, config.num_groups, config.state_size,
                a_log, d, dt_bias,
            )  # fmt: skip
            dt = random((num_tokens, heads), dtype=torch.bfloat16)
            return lambda: kernels.ssd_scan(
                kernels.short_conv(x, states, step, conv), dt, states, step, ssd
            )
        heads = config.num_value_heads
        a_log, dt_bias = random((2, heads)).unbind()
        rule = DeltaSpec(
            index, offset, config.num_key_heads, heads, config.key_dim, config.value_dim,
            a_log, dt_bias,
        )  # fmt: skip
        gates = random((num_tokens, 2 * heads), dtype=torch.bfloat16)
        return lambda: kernels.delta_rule(
            kernels.short_conv(x, states, step, conv), gates, states, step, rule
        )

    return [layer(index) for index in range(copies)]


def _step(counts: list[int], device: torch.device) -> DeviceStep:
    """Single tokens go on from states; a prompt begins."""
    num_seqs, num_tokens = len(counts), sum(counts)
    is_decode = num_tokens == num_seqs
    starts = np.cumsum([0, *counts]).astype(np.int32)
    nothing = np.zeros(num_tokens, np.int32)
    step = BackendStep(
        token_ids=nothing, positions=nothing, slots=nothing[None] - 1, seq_starts=starts,
        seq_lens=np.array(counts, np.int32) + (255 if is_decode else 0),
        rows=np.arange(num_seqs, dtype=np.int32),
        block_tables=np.zeros((1, num_seqs, num_tokens // 16 + 17), np.int32),
        logit_rows=starts[1:] - 1, copies=np.zeros((0, 3), np.int32),
        states=StateStep(
            np.random.default_rng(0).permutation(num_seqs).astype(np.int32), nothing - 1,
            np.zeros((0, 2), np.int32),
        ),
    )  # fmt: skip
    limits = BackendLimits(
        max_tokens=num_tokens, max_seqs=num_seqs, max_logit_rows=num_seqs,
        max_model_len=num_tokens + 256,
    )  # fmt: skip
    buffer = StepBuffer(limits, device, has_states=True)
    rows = np.zeros(num_seqs, np.int32)
    sampling = SamplingBatch(new_table(1), rows, rows, rows - 1, np.zeros((1, 1), np.int32))
    tiles = cut_walks(step.seq_lens, 0) if is_decode else cut_tiles(starts, 16)
    sizes = StepSizes(num_tokens, num_seqs, num_seqs, len(tiles.seqs))
    buffer.send(buffer.fill(step, sampling, tiles, sizes))
    return buffer.step(sizes, is_decode=is_decode, max_seq_len=int(step.seq_lens.max()), host=step)
