"""The kinds of attention that models have, and what computes it on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.caches import StateSpec
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.config import AttentionBackend, KVCacheDType
    from octavo_engine.models.config import ModelConfig


def unusual_attention(config: ModelConfig) -> str | None:
    """What only the kernels for prompts and for single tokens compute, in words."""
    if config.latent is not None:
        return "latent attention"
    if config.family.has_sinks:
        return "attention with sinks"
    if config.block.positions == "alibi":
        return "attention with linear biases"
    if any(layer.is_chunked for layer in config.layers):
        return "attention within chunks"
    return None


def walks_few(config: ModelConfig, kv_cache_dtype: KVCacheDType) -> bool:
    """Whether a few tokens of a sequence are attended to as single ones are."""
    has_states = any(isinstance(spec, StateSpec) for spec in config.caches())
    is_usual = unusual_attention(config) is None and kv_cache_dtype == "auto"
    return is_usual and not has_states


def check_attention(config: ModelConfig, attention: AttentionBackend) -> None:
    """Raises ConfigError where only our own kernels compute a model's attention."""
    what = unusual_attention(config)
    if what is not None and attention == "flashinfer":
        raise ConfigError(
            f"--attention-backend flashinfer does not compute the {what} of "
            f"{config.architecture}; use auto or triton"
        )
