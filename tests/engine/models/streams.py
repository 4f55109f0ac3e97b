"""Rows of the families whose residual is several streams; as tiny.FAMILIES."""

from __future__ import annotations

from typing import Any

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
                            "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 2,  # which read layers 2 and 1
            "head_dim": 32, "sliding_window": 24, "laurel_rank": 32,
            "intermediate_size": [96, 96, 64, 64, 96],
            "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": 200,  # some tokens have none of their own
            "hidden_size_per_layer_input": 32, "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3n-other": (
        "Gemma3nText",
        {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_kv_shared_layers": 0, "head_dim": 16, "sliding_window": 24, "laurel_rank": 32,
            "activation_sparsity_pattern": [0.0, 0.9], "altup_num_inputs": 3,
            "altup_active_idx": 1, "altup_correct_scale": False,
            "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 32,
            "attention_bias": True,
        },
    ),
}  # fmt: skip
