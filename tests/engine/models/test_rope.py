"""Frequencies against those of transformers, for every kind of rope."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo_engine.models.config import ModelConfig
from octavo_engine.models.rope import RopeConfig, make_rope

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 0.5 * i for i in range(32)],
    },
    "longrope-given": {
        "rope_type": "longrope",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0] * 24,
        "long_factor": [3.0] * 24,
        "partial_rotary_factor": 0.75,
    },
}


@pytest.mark.parametrize("max_model_len", [512, 4096, 9000])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str, max_model_len: int) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_theta": 5e5, **ROPES[name]}
    truth = transformers.LlamaConfig(**SHAPE, rope_parameters=dict(settings))
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](
        truth, torch.device("cpu"), seq_len=max_model_len
    )
    config = ModelConfig.from_hf(
        {**SHAPE, "architectures": ["LlamaForCausalLM"], "rope_parameters": settings}
    )
    assert config.layers[0].rope is not None
    rope = make_rope(config.layers[0].rope, max_model_len)
    assert rope.inv_freq.dtype == np.float32
    np.testing.assert_allclose(rope.inv_freq, inv_freq.numpy(), rtol=4e-7)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_the_plain_rope_is_the_formula() -> None:
    rope = make_rope(RopeConfig(theta=10000.0, rotary_dim=8, max_positions=64), 64)
    np.testing.assert_allclose(rope.inv_freq, [1.0, 0.1, 0.01, 0.001], rtol=2e-7)
    assert rope.attention_factor == 1.0
