"""Rows of the families whose layers have recurrent states; as tiny.FAMILIES."""

from __future__ import annotations

from typing import Any

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 16,
            "intermediate_size": 130,
        },
    ),
    "lfm2-biased": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "conv", "full_attention"],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_offset": 0,
            "num_experts": 4,
            "mamba_dt_rank": 32,
            "mamba_d_state": 12,
        },
    ),
    "jamba-plain": (
        "Jamba",
        {
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_expand": 3,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
        },
    ),
    "mamba": ("Mamba", {"state_size": 8, "time_step_rank": 32, "use_bias": True}),
    "mamba-auto": (
        "Mamba",
        {
            "state_size": 6,
            "expand": 3,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-mamba": (
        "FalconMamba",
        {"state_size": 8, "time_step_rank": 32, "use_bias": True, "mixer_rms_eps": 0.05},
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 32,
            "use_bias": True,
        },
    ),
    "mamba2-limited": (
        "Mamba2",
        {
            "num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16, "conv_kernel": 3,
            "use_conv_bias": False, "time_step_limit": (0.3, 1.5), "tie_word_embeddings": True,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            "num_hidden_layers": 3, "n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2,
            "layers_block_type": ["hybrid", "hybrid", "hybrid"], "num_mem_blocks": 2,
            "adapter_rank": 32, "use_shared_attention_adapter": True, "use_mem_rope": True,
            "chunk_size": 32, "num_key_value_heads": 4,
        },
    ),
    "zamba2-one-block": (
        "Zamba2",
        {
            "num_hidden_layers": 3, "n_mamba_heads": 4, "mamba_d_state": 24, "adapter_rank": 32,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "chunk_size": 32,
            "num_key_value_heads": 4, "intermediate_size": None, "add_bias_linear": True,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 96, "num_local_experts": 0, "mamba_n_heads": 8,
            "mamba_d_state": 16, "mamba_chunk_size": 32, "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite4-moe": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
            "shared_intermediate_size": 64, "intermediate_size": 48, "num_local_experts": 4,
            "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 32,
            "position_embedding_type": "rope", "mamba_n_groups": 2, "attention_multiplier": 0.2,
            "residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [1], "head_dim": 32,
            "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 32,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            "mamba_n_heads": 6, "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_n_groups": 2,
            "mamba_chunk_size": 32, "embedding_multiplier": 5.6, "lm_head_multiplier": 0.4,
            "key_multiplier": 0.4, "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.5, "mlp_multipliers": [0.6, 0.3],
            "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.2,
            "ssm_multipliers": [0.4, 0.9, 1.2, 0.7, 0.6],
        },
    ),
    "falcon-h1-normed": (
        "FalconH1",
        {
            "num_hidden_layers": 1, "mamba_n_heads": 4, "mamba_d_ssm": None, "mamba_d_state": 24,
            "mamba_n_groups": 2, "mamba_chunk_size": 32, "mamba_rms_norm": True,
            "mamba_norm_before_gate": False, "tie_word_embeddings": True, "mamba_proj_bias": True,
            "projectors_bias": True, "mlp_multipliers": [1.0, 0.5], "head_dim": 32,
        },
    ),
    "falcon-h1-normed-first": (
        "FalconH1",
        {
            "num_hidden_layers": 1, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_state": 24,
            "mamba_chunk_size": 32, "mamba_rms_norm": True, "mamba_norm_before_gate": True,
            "mamba_n_groups": 2,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
            "ssm_state_size": 16, "chunk_size": 32,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 3, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
            "linear_value_head_dim": 16, "mlp_only_layers": [2],
        },
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        {
            "num_hidden_layers": 3, "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
            "linear_value_head_dim": 16, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                                "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
                                "mrope_interleaved": True},
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        {
            "num_hidden_layers": 2, "head_dim": 32, "num_experts": 5, "num_experts_per_tok": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
            "linear_value_head_dim": 16,
        },
    ),
}  # fmt: skip
