"""How a device's KV cache holds numbers: as the model computes them, or in eight bits with scales.

The form in eight bits is the CPU's (`csrc/cpu/heads.cpp`): a token's row of a head, of its key or
its value, has one scale, a bf16 number rounded up, that makes the row's largest magnitude 448.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo_engine.backends.torch.reference import block_values
from octavo_engine.caches import KVSpec
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from octavo_engine.caches import CacheLayout, PagedSpec
    from octavo_engine.config import KVCacheDType

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 2.0**-100  # rows of next to nothing become zeros
SCALE_BYTES = 2


class DeviceKVFormat(NamedTuple):
    dtype: torch.dtype
    has_scales: bool = False

    def bytes_of(self, spec: PagedSpec) -> int:
        """What a layer takes of a block of 16 tokens."""
        num_bytes = block_values(spec) * self.dtype.itemsize
        if self.has_scales:
            assert isinstance(spec, KVSpec)
            num_bytes += 2 * BLOCK_SIZE * spec.num_kv_heads * SCALE_BYTES
        return num_bytes


def settle_kv_format(
    requested: KVCacheDType,
    dtype: torch.dtype,
    layout: CacheLayout,
    *,
    has_e4m3: bool,
    reads_scales: bool,
) -> DeviceKVFormat:
    """`has_e4m3`: the device; `reads_scales`: its attention. Raises ConfigError where they, or the
    model, cannot have what was requested."""
    own = str(dtype).removeprefix("torch.")
    if requested in ("auto", own):
        return DeviceKVFormat(dtype)
    if requested not in ("fp8", "fp8_e4m3"):
        raise ConfigError(
            f"--kv-cache-dtype {requested} is not computed by --device cuda with --dtype {own}; "
            f"use auto, {own} or fp8"
        )
    flag = f"--kv-cache-dtype {requested}"
    if not has_e4m3:
        raise ConfigError(
            f"{flag} needs a GPU with e4m3: NVIDIA from compute capability 8.9 on; use auto"
        )
    if not reads_scales:
        raise ConfigError(
            f"{flag} is not read by FlashInfer here: use --attention-backend triton, or auto"
        )
    if not all(isinstance(spec, KVSpec) for spec in layout.specs):
        raise ConfigError(f"{flag} is not supported for models with latent attention; use auto")
    return DeviceKVFormat(E4M3, has_scales=True)


def narrow_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., head_dim] in e4m3, and the rows' scales. An infinity or NaN makes its row's
    scale NaN."""
    largest = rows.abs().amax(-1)
    # By a tensor: a device would multiply by the inverse of a number of the host's.
    scales = largest / largest.new_full((), LARGEST) + (rows * 0.0).sum(-1)
    words = scales.view(torch.int32)
    rounded = ((words + 0xFFFF) & -0x10000).view(torch.float32)
    scales = torch.where(scales < LEAST_SCALE, 0.0, torch.where(scales.isnan(), scales, rounded))
    factors = torch.where(scales == 0, 0.0, scales.new_ones(()) / scales)
    return (rows * factors[..., None]).to(E4M3), scales.to(torch.bfloat16)


def widen_blocks(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Blocks [n, 16, heads, head_dim] as they are computed with."""
    if scales is None:
        return values
    return (values.float() * scales.float().transpose(1, 2)[..., None]).to(dtype)
