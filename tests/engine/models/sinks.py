"""Rows of gpt-oss: attention sinks, windows in turns, experts with biases."""

from __future__ import annotations

from typing import Any

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 15e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

# As tiny.FAMILIES.
SINKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": _YARN,
        },
    ),
    "gpt-oss-of-one-kind": (
        "GptOss",
        {
            "head_dim": 32,
            "num_key_value_heads": 4,
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
