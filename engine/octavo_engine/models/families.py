"""What each family's config.json leaves unsaid: one row a family."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read a family's config.json, and on which page of this package it is written."""

    page: Literal["llama", "gemma"] = "llama"
    qkv_bias: bool | None = None  # None: as `attention_bias` says
    output_bias: bool | None = None
    qk_norm: bool = False
    fused_projections: bool = False  # qkv_proj and gate_up_proj are stored as one matrix each
    scales: Literal["plain", "granite", "gemma"] = "plain"
    # Which layers see only a window: all; from `max_window_layers` on; those without rope; all but
    # every `sliding_window_pattern`-th. A list `layer_types` overrules the last three.
    windows: Literal["none", "all", "upper", "nope", "pattern"] = "none"
    nope: bool = False  # some layers have no rope
    local_rope: bool = False  # layers with a window have a rope of their own
    yarn_is_longrope: bool = False  # an old spelling
    # How a mixture of experts names its parts and weighs them; shared: one more sees every token.
    experts: Literal["none", "mixtral", "qwen", "qwen-shared"] = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)


def find_family(architecture: str) -> Family:
    """The family of an architecture, by its name in config.json."""
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(
            f"config.json: architecture {architecture!r} is not supported; supported are: {known}"
        )
    return FAMILIES[architecture]


_QWEN = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_sliding_window": True,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_LLAMA = Family(defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048})
_GEMMA3_FAMILY = Family(
    page="gemma", scales="gemma", windows="pattern", qk_norm=True, local_rope=True, defaults=_GEMMA3
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            windows="all",
            defaults={
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "use_sliding_window": True,
            },
        ),
        "Qwen2ForCausalLM": Family(
            qkv_bias=True, output_bias=False, windows="upper", defaults=_QWEN
        ),
        "Qwen3ForCausalLM": Family(
            qk_norm=True, windows="upper", defaults=_QWEN | {"head_dim": 128}
        ),
        "MixtralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            windows="all",
            experts="mixtral",
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "rope_theta": 1e6,
                "use_sliding_window": True,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
        ),
        "Qwen2MoeForCausalLM": Family(
            qkv_bias=True,
            output_bias=False,
            windows="upper",
            experts="qwen-shared",
            defaults=_QWEN
            | {
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
            },
        ),
        "Qwen3MoeForCausalLM": Family(
            qk_norm=True,
            windows="upper",
            experts="qwen",
            # The whole model's or none: config.json lists no layers that differ.
            defaults=_QWEN
            | {
                "max_window_layers": 0,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
            },
        ),
        "SmolLM3ForCausalLM": Family(
            windows="nope",
            nope=True,
            defaults={
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "rope_theta": 2e6,
                "no_rope_layer_interval": 4,
                "tie_word_embeddings": True,
            },
        ),
        "Phi3ForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            fused_projections=True,
            windows="all",
            yarn_is_longrope=True,
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "use_sliding_window": True,
            },
        ),
        "GraniteForCausalLM": Family(
            scales="granite",
            defaults={
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 2048,
                "embedding_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
        ),
        "Gemma2ForCausalLM": Family(
            page="gemma", scales="gemma", windows="pattern", defaults=_GEMMA2
        ),
        "Gemma3ForCausalLM": _GEMMA3_FAMILY,
        "Gemma3ForConditionalGeneration": _GEMMA3_FAMILY,  # its text part
    }
)
