"""Reading config.json: both spellings, defaults that files leave out, hostile values."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from octavo_engine.errors import ModelError
from octavo_engine.models.alibi import alibi_slopes
from octavo_engine.models.config import LayerConfig, ModelConfig
from octavo_engine.models.families import FAMILIES as KNOWN
from octavo_engine.models.rope import RopeConfig
from tests.engine.models.tiny import known_architectures, tiny_model
from tests.engine.models.tiny_seeing import SEEING, seeing_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": [7, 9],
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
    "rope_type": "llama3",
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key != name}


def test_a_plain_llama() -> None:
    config = read()
    assert (config.vocab_size, config.num_layers, config.head_dim) == (1000, 3, 16)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert config.attention_scale == 0.25
    assert config.torch_dtype == "bfloat16"
    assert config.eos_token_ids == (7, 9)
    assert not config.tie_word_embeddings
    rope = RopeConfig(theta=500000.0, rotary_dim=16, max_positions=2048)
    assert config.layers == (LayerConfig(window=None, rope=rope),) * 3


def test_old_and_new_spellings_of_rope_and_dtype_are_the_same() -> None:
    old = read(rope_scaling=LLAMA3_ROPE)
    new = dict(LLAMA, rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0}, dtype="bfloat16")
    del new["rope_theta"], new["torch_dtype"]
    assert ModelConfig.from_hf(new) == old
    rope = old.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.original_max_positions) == ("llama3", 500000.0, 512)
    assert read(rope_scaling={"type": "linear", "factor": 2}) == read(
        rope_scaling={"rope_type": "linear", "factor": 2.0}
    )


def test_every_family_is_tried_by_a_tiny_model() -> None:
    # In a wrapper, or by another spelling.
    same = {
        "Llama4ForConditionalGeneration", "Gemma3nForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
        "BaiChuanForCausalLM", "MPTForCausalLM",
    }  # fmt: skip
    speech = {"WhisperForConditionalGeneration"}  # of tiny_speech
    seeing = {str(seeing_model(name).config["architectures"][0]) for name in SEEING}
    assert known_architectures() | seeing | speech == set(KNOWN) - same


def test_what_a_family_leaves_unsaid() -> None:
    mistral = ModelConfig.from_hf({**LLAMA, "architectures": ["MistralForCausalLM"]})
    assert [layer.window for layer in mistral.layers] == [4096] * 3
    unlimited = ModelConfig.from_hf(
        {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
    )
    assert [layer.window for layer in unlimited.layers] == [None] * 3
    qwen = ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"]})
    assert (qwen.qkv_bias, qwen.output_bias) == (True, False)
    assert [layer.window for layer in qwen.layers] == [None] * 3
    smol = ModelConfig.from_hf(
        {**without("rope_theta"), "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8}
    )
    assert [layer.rope is not None for layer in smol.layers] == [True, True, True, False] * 2
    assert smol.layers[0].rope is not None
    assert smol.layers[0].rope.theta == 2e6


def test_an_old_phi3_names_its_longrope_otherwise() -> None:
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = {
        **LLAMA,
        "architectures": ["Phi3ForCausalLM"],
        "rope_scaling": rope,
        "original_max_position_embeddings": 1024,
    }
    config = ModelConfig.from_hf(phi)
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.kind == "longrope"
    assert config.layers[0].rope.factor == 2.0
    assert ModelConfig.from_hf({**phi, "rope_scaling": {**rope, "type": "yarn"}}) == config


def test_the_text_part_of_a_model_that_sees() -> None:
    """As the files of Gemma 3 have it: much is left to the defaults, and the ends are outside."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert config.is_part
    assert config.eos_token_ids == (1, 106)
    assert config.torch_dtype == "bfloat16"
    assert config.tie_word_embeddings
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    local, full = config.layers[0], config.layers[5]
    assert (local.window, full.window) == (1024, None)
    assert local.rope is not None
    assert full.rope is not None
    assert (local.rope.kind, local.rope.theta) == ("default", 1e4)
    assert (full.rope.kind, full.rope.theta, full.rope.factor) == ("linear", 1e6, 8.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "3"),
        ("num_hidden_layers", 3.0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", None),
        ("num_attention_heads", -4),
        ("num_attention_heads", 10**18),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", []),
        ("hidden_size", 0),
        ("hidden_size", 66),
        ("head_dim", 7),
        ("head_dim", 10**6),
        ("intermediate_size", {"a": 1}),
        ("vocab_size", 2**40),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 10**400),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", -1.0),
        ("rope_theta", float("inf")),
        ("rope_theta", 0.5),
        ("hidden_act", "quick_gelu"),
        ("torch_dtype", "int8"),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", -1),
        ("eos_token_id", ["</s>"]),
        ("bos_token_id", 2**40),
        ("rope_scaling", "linear"),
        ("rope_scaling", [1]),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", []),
        ("text_config", 3),
        ("partial_rotary_factor", 0.01),
        ("partial_rotary_factor", 2.0),
    ],
)
def test_a_hostile_value_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"config.json.*{field}"):
        read(**{field: value})


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} is missing"):
        ModelConfig.from_hf(without(field))


@pytest.mark.parametrize(
    ("field", "rope"),
    [
        ("rope_type", {"rope_type": "mrope"}),
        (r"type .*got 'mrope'", {"type": "mrope"}),
        ("type", {"type": 5}),
        ("factor", {"rope_type": "linear"}),
        ("factor", {"rope_type": "linear", "factor": 0}),
        ("factor", {"rope_type": "yarn", "factor": 1e9}),
        ("factor", {"rope_type": "dynamic", "factor": 0.5}),
        ("high_freq_factor", {**LLAMA3_ROPE, "high_freq_factor": 0.5}),
        (
            "original_max_position_embeddings",
            {**LLAMA3_ROPE, "original_max_position_embeddings": -5},
        ),
        ("short_factor", {"rope_type": "longrope", "long_factor": [1.0] * 8}),
        (
            "long_factor",
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8},
        ),
    ],
)
def test_a_hostile_rope_is_refused_by_its_name(field: str, rope: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"rope_scaling: {field}"):
        read(rope_scaling=rope)


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("Qwen3ForCausalLM", "layer_types", ["full_attention"]),
        ("Qwen3ForCausalLM", "layer_types", ["chunked_attention"] * 3),
        ("SmolLM3ForCausalLM", "no_rope_layers", [1, 2, 3]),
        ("GraniteForCausalLM", "logits_scaling", 0.0),
        ("MistralForCausalLM", "sliding_window", -4096),
        ("Gemma2ForCausalLM", "query_pre_attn_scalar", -1),
        ("Gemma3ForCausalLM", "use_bidirectional_attention", True),
    ],
)
def test_hostile_values_of_families(architecture: str, field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field):
        read(architectures=[architecture], **{field: value})


def test_an_unknown_architecture_error_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="'RwkvForCausalLM' is not supported") as caught:
        read(architectures=["RwkvForCausalLM"])
    assert all(name in str(caught.value) for name in KNOWN)


@pytest.mark.parametrize(
    ("architecture", "advice"),
    [
        ("ChatGLMModel", "ends in -hf"),
        ("ChatGLMForConditionalGeneration", "ends in -hf"),
        ("QWenLMHeadModel", "Qwen 1.5"),
        ("RWForCausalLM", "FalconForCausalLM"),
        ("MiniCPM3ForCausalLM", "MiniCPM 1 or 2"),
    ],
)
def test_a_format_of_its_own_code_is_refused_with_advice(architecture: str, advice: str) -> None:
    with pytest.raises(ModelError, match=f"{architecture}' is not supported: .*{advice}"):
        read(architectures=[architecture])


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "n_embd", 0),
        ("bigcode", "n_layer", "2"),
        ("opt", "do_layer_norm_before", False),
        ("opt", "word_embed_proj_dim", 32),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("phi", "qk_layernorm", True),
        ("mpt", "attn_config.alibi", False),
        ("mpt", "attn_config.alibi_bias_max", 16),
        ("olmoe", "clip_qkv", 8.0),
        ("dbrx", "ffn_config.moe_normalize_expert_weights", 2),
        ("dbrx", "attn_config.kv_n_heads", 3),
        ("falcon-new", "num_kv_heads", 3),
        ("falcon-new", "num_ln_in_parallel_attn", []),
        ("gptj", "rotary_dim", 17),
        ("cohere", "logit_scale", -1.0),
        ("exaone4", "sliding_window_pattern", "LLLG"),
        ("hunyuan-alpha", "rope_parameters.alpha", -2.0),
        ("baichuan-13b", "model_max_length", 0),
    ],
)
def test_hostile_values_of_classics(name: str, field: str, value: object) -> None:
    config: dict[str, Any] = copy.deepcopy(tiny_model(name).config)
    *outer, last = field.split(".")
    inner = config
    for part in outer:
        inner = inner[part]
    inner[last] = value
    config.pop("layer_types", None)
    with pytest.raises(ModelError, match=f"config.json.*{last}"):
        ModelConfig.from_hf(config)


def test_names_of_their_own_are_those_of_the_error() -> None:
    config = {k: v for k, v in tiny_model("gpt2").config.items() if k != "n_embd"}
    with pytest.raises(ModelError, match="n_embd is missing"):
        ModelConfig.from_hf(config)


def test_command_r_turns_only_where_it_sees_a_window() -> None:
    layers = ModelConfig.from_hf(tiny_model("cohere2").config).layers
    assert [(layer.window, layer.rope is not None) for layer in layers] == [
        (24, True), (24, True), (24, True), (None, False)
    ]  # fmt: skip


def test_slopes_of_linear_biases() -> None:
    four = alibi_slopes(ModelConfig.from_hf(tiny_model("bloom").config))
    assert four.tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    six = alibi_slopes(ModelConfig.from_hf(tiny_model("bloom-six-heads").config))
    np.testing.assert_allclose(six, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    strided = alibi_slopes(ModelConfig.from_hf(tiny_model("mpt-clipped-six-heads").config))
    np.testing.assert_allclose(strided, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
