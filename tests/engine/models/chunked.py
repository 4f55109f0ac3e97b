"""Rows of Llama 4: attention within chunks, layers without rope, experts that weigh their input."""

from __future__ import annotations

from typing import Any

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}

# As tiny.FAMILIES.
CHUNKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "rope_parameters": _LLAMA3,
        },
    ),
    "llama4-plain": (
        "Llama4Text",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "moe_layers": [0],
            "intermediate_size_mlp": 64,
            "no_rope_layers": [0, 1],
            "attention_chunk_size": 32,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
