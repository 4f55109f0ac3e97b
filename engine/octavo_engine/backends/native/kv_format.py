"""The extension's KV cache: what `--kv-cache-dtype` means here, and its layers' places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from octavo_engine import _native
from octavo_engine.caches import KVSpec, LatentSpec
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.caches import CacheLayout, PagedSpec
    from octavo_engine.config import KVCacheDType

FormatName = Literal["f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2"]


class KVFormat(NamedTuple):
    """How a key or value is held: its numbers, and a scale for each token and head, or none."""

    name: FormatName
    element_bytes: int
    scale_bytes: int = 0

    def bytes_of(self, spec: PagedSpec) -> int:
        """What a layer takes of a block of 16 tokens."""
        if isinstance(spec, LatentSpec):
            return BLOCK_SIZE * spec.dim * self.element_bytes
        row = spec.head_dim * self.element_bytes + self.scale_bytes
        return 2 * BLOCK_SIZE * spec.num_kv_heads * row


_FORMATS: dict[KVCacheDType, KVFormat] = {
    "float32": KVFormat("f32", 4),
    "bfloat16": KVFormat("bf16", 2),
    "int8": KVFormat("int8", 1, 2),
    "fp8": KVFormat("fp8_e4m3", 1, 2),
    "fp8_e4m3": KVFormat("fp8_e4m3", 1, 2),
    "fp8_e5m2": KVFormat("fp8_e5m2", 1, 2),
}


def settle_kv_format(requested: KVCacheDType, dtype: Dtype) -> KVFormat:
    """What was requested; else the format that the model computes in."""
    if requested == "auto":
        requested = "float32" if dtype == "f32" else "bfloat16"
    return _FORMATS[requested]


def check_kv_format(layout: CacheLayout, kv_format: KVFormat) -> None:
    """Raises ConfigError where a layer cannot be kept so."""
    if kv_format.scale_bytes and any(isinstance(spec, LatentSpec) for spec in layout.specs):
        raise ConfigError(
            "--kv-cache-dtype in 8 bits is not supported for models with latent attention; "
            "use auto, bfloat16 or float32"
        )


def make_kv_cache(layout: CacheLayout, num_blocks: int, kv_format: KVFormat) -> _native.KVCache:
    """Raises MemoryError."""
    layers = [(place.group, place.region, *_heads_of(spec)) for spec, place in layout.paged()]
    if not layers:  # memory that is never written is none
        layers = [(0, 0, 1, 16)]
    windows = [window or 0 for window in layout.windows]
    ranks = [spec.rank if isinstance(spec, LatentSpec) else 0 for spec, _ in layout.paged()]
    return _native.KVCache(num_blocks, layers, windows, kv_format.name, ranks)


def _heads_of(spec: PagedSpec) -> tuple[int, int]:
    """How many, and how wide; a latent vector is a head that all others share."""
    if isinstance(spec, KVSpec):
        return spec.num_kv_heads, spec.head_dim
    return 1, spec.dim
