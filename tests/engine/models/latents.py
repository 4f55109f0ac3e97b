"""Rows of the families with latent attention, or with experts that are chosen by groups."""

from __future__ import annotations

from typing import Any

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}

# As tiny.FAMILIES.
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**_LATENT, **_EXPERTS, "q_lora_rank": None, "rope_parameters": _YARN},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": 40,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "attention_bias": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.5,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
        },
    ),
    "youtu": ("Youtu", {**_LATENT, "q_lora_rank": 40, "attention_bias": True}),
    "dots1": (
        "Dots1",
        {
            **_EXPERTS,
            "head_dim": 16,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "solar-open": (
        "SolarOpen",
        {
            **{k: v for k, v in _EXPERTS.items() if k != "first_k_dense_replace"},
            "head_dim": 32,
            "attention_bias": True,
            "n_group": 2,
            "n_shared_experts": 1,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {**_EXPERTS, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4-moe-plain": ("Glm4Moe", {**_EXPERTS, "head_dim": 16, "n_group": 2}),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**{k: v for k, v in _EXPERTS.items() if k != "first_k_dense_replace"},
         **_LATENT, "q_lora_rank": 40, "routed_scaling_factor": 1.0,
         "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}  # fmt: skip
