"""The sizes of latent attention, read from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.caches import LatentSpec

if TYPE_CHECKING:
    from octavo_engine.models.fields import ConfigFields

MAX_RANK = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """The sizes of latent attention."""

    rank: int  # of the vector that is kept
    rope_dim: int  # columns of a query, and of the one key, that turn
    nope_dim: int  # a query's other columns
    value_dim: int
    query_rank: int | None  # queries pass through a vector of this size
    turns_neighbours: bool  # rope's pairs are (2 i, 2 i + 1)

    def cache(self, window: int | None) -> LatentSpec:
        return LatentSpec(self.rank, self.rope_dim, window)


def read_latent(fields: ConfigFields) -> dict[str, Any]:
    """The fields of ModelConfig that latent attention has of its own."""

    def size(name: str) -> int:
        return fields.integer(name, maximum=MAX_RANK)

    interleaved = fields.raw("rope_interleave") is None or fields.boolean("rope_interleave")
    latent = LatentConfig(
        rank=size("kv_lora_rank"),
        rope_dim=size("qk_rope_head_dim"),
        nope_dim=size("qk_nope_head_dim"),
        value_dim=size("v_head_dim"),
        query_rank=fields.optional_integer("q_lora_rank", maximum=MAX_RANK),
        turns_neighbours=interleaved,
    )
    # Kernels hold a token's vector in whole panels of 16 numbers.
    for name, value in (("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rope_dim)):
        if value % 16:
            raise fields.error(name, "must be a multiple of 16")
    for name, value in (("qk_nope_head_dim", latent.nope_dim), ("v_head_dim", latent.value_dim)):
        if value % 2:
            raise fields.error(name, "must be even")
    head_dim = latent.nope_dim + latent.rope_dim
    scale = head_dim**-0.5 * _yarn_scale(fields) ** 2
    return {"latent": latent, "head_dim": head_dim, "attention_scale": scale}


def _yarn_scale(fields: ConfigFields) -> float:
    section = fields.section("rope_scaling") or fields.section("rope_parameters")
    if section is None:
        return 1.0
    all_dim, factor = section.raw("mscale_all_dim"), section.optional_positive("factor")
    if not all_dim or factor is None or factor <= 1:
        return 1.0
    return 0.1 * section.positive("mscale_all_dim") * math.log(factor) + 1.0
