"""Settings of families that no page computes are refused by name."""

from __future__ import annotations

import pytest

from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.recurrent_config import SelectiveConfig
from tests.engine.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("cwm", {"layer_types": None}, "layer_types must say which layers have a window"),
        ("hyperclovax", {"use_post_norm": False}, "use_post_norm must be true: other forms"),
        ("lfm2-moe", {"use_expert_bias": False}, "use_expert_bias must be true; got False"),
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset must be from 0 to 2; got 3"),
        ("jamba", {"expert_layer_period": 0}, "expert_layer_period must be from 1"),
        ("jamba", {"mamba_dt_rank": "some"}, "mamba_dt_rank must be an integer; got 'some'"),
        ("zamba2", {"layers_block_type": ["hybrid", "moe", "hybrid"]}, "hybrid at least once"),
        ("zamba2", {"layers_block_type": ["mamba"] * 3}, "hybrid at least once"),
        ("gemma3n", {"num_kv_shared_layers": 4}, "leaves layer 1 no earlier one of its kind"),
        ("gemma3n", {"num_kv_shared_layers": 5}, "must be below 5, the layers"),
        ("gemma3n", {"intermediate_size": [96, 64]}, "must be one size, or 5"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5, 1.0]}, "must hold 5 numbers"),
        ("zamba2", {"use_long_context": True}, "use_long_context must be false"),
        ("zamba2", {"attention_head_dim": 16}, "attention_head_dim times 4 heads must be 128"),
        ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        ("zamba2", {"rms_norm_eps": 1e-6}, "rms_norm_eps must be 1e-5"),
        ("falcon-mamba", {"mixer_rms_eps": 0}, "mixer_rms_eps"),
        ("mamba", {"conv_kernel": 17}, "conv_kernel must be from 2 to 16; got 17"),
    ],
)
def test_settings_are_checked(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(tiny_model(name).config | change)


def test_jambas_layers_are_where_its_periods_say() -> None:
    config = ModelConfig.from_hf(tiny_model("jamba").config)
    assert [layer.mixer for layer in config.layers] == ["mamba", "attention", "mamba"]
    assert [layer.has_experts for layer in config.layers] == [True, False, True]
    assert isinstance(config.recurrent, SelectiveConfig)
    spec = config.recurrent.state(config.hidden_size)
    assert spec.scan == (1, 12, 128)
    plain = ModelConfig.from_hf(tiny_model("jamba-plain").config)
    assert plain.experts is None


def test_the_rank_of_dt_is_a_sixteenth_of_the_width() -> None:
    config = ModelConfig.from_hf(tiny_model("jamba").config | {"mamba_dt_rank": "auto"})
    assert isinstance(config.recurrent, SelectiveConfig)
    assert config.recurrent.dt_rank == 4
