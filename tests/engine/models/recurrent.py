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
}
