"""config.json as well-known checkpoints have it: the fields that decide a shape, and the shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.decoder_names import under_our_names
from octavo_engine.weights.views import Arranged, StoredPlace
from tests.engine.models.tiny import MemoryCheckpoint, tiny_model


class Shape(NamedTuple):
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool


PUBLISHED: dict[str, tuple[dict[str, Any], Shape]] = {
    "gpt2": (
        {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "n_ctx": 1024,
         "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
         "layer_norm_epsilon": 1e-5, "bos_token_id": 50256, "eos_token_id": 50256},
        Shape(768, 12, 12, 12, 64, 3072, 1024, True),
    ),
    "pythia-1b": (
        {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 2048,
         "intermediate_size": 8192, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
         "num_attention_heads": 8, "num_hidden_layers": 16, "rotary_emb_base": 10000,
         "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
         "vocab_size": 50304},
        Shape(2048, 16, 8, 8, 256, 8192, 2048, False),
    ),
    "gpt-j-6b": (
        {"architectures": ["GPTJForCausalLM"], "activation_function": "gelu_new", "n_embd": 4096,
         "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True,
         "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False,
         "vocab_size": 50400},
        Shape(4096, 28, 16, 16, 256, 16384, 2048, False),
    ),
    "falcon-7b": (
        {"architectures": ["FalconForCausalLM"], "alibi": False, "bias": False,
         "hidden_size": 4544, "layer_norm_epsilon": 1e-5, "multi_query": True,
         "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
         "parallel_attn": True, "vocab_size": 65024},
        Shape(4544, 32, 71, 1, 64, 18176, 2048, True),
    ),
    "falcon-40b": (
        {"architectures": ["FalconForCausalLM"], "alibi": False, "bias": False,
         "hidden_size": 8192, "layer_norm_epsilon": 1e-5, "multi_query": True,
         "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60,
         "num_kv_heads": 8, "parallel_attn": True, "vocab_size": 65024},
        Shape(8192, 60, 128, 8, 64, 32768, 2048, True),
    ),
    "bloom-560m": (
        {"architectures": ["BloomForCausalLM"], "n_embed": 1024, "n_inner": None, "n_layer": 24,
         "num_attention_heads": 16, "layer_norm_epsilon": 1e-5, "vocab_size": 250880,
         "apply_residual_connection_post_layernorm": False, "seq_length": 2048},
        Shape(1024, 24, 16, 16, 64, 4096, 2048, True),
    ),
    "mpt-7b": (
        {"architectures": ["MPTForCausalLM"], "d_model": 4096, "n_heads": 32, "n_layers": 32,
         "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "logit_scale": None,
         "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False,
                         "prefix_lm": False, "softmax_scale": None}, "vocab_size": 50432},
        Shape(4096, 32, 32, 32, 128, 16384, 2048, True),
    ),
    "starcoder": (
        {"architectures": ["GPTBigCodeForCausalLM"], "activation_function": "gelu",
         "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40,
         "n_positions": 8192, "layer_norm_epsilon": 1e-5, "vocab_size": 49152},
        Shape(6144, 40, 48, 1, 128, 24576, 8192, True),
    ),
    "opt-125m": (
        {"architectures": ["OPTForCausalLM"], "activation_function": "relu",
         "do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768,
         "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12,
         "vocab_size": 50272, "word_embed_proj_dim": 768},
        Shape(768, 12, 12, 12, 64, 3072, 2048, True),
    ),
    "phi-2": (
        {"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "hidden_size": 2560,
         "intermediate_size": 10240, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
         "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
         "partial_rotary_factor": 0.4, "qk_layernorm": False, "tie_word_embeddings": False,
         "vocab_size": 51200},
        Shape(2560, 32, 32, 32, 80, 10240, 2048, False),
    ),
    "dbrx": (
        {"architectures": ["DbrxForCausalLM"], "d_model": 6144, "n_heads": 48, "n_layers": 40,
         "max_seq_len": 32768, "vocab_size": 100352, "tie_word_embeddings": False,
         "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
         "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        Shape(6144, 40, 48, 8, 128, 10752, 32768, False),
    ),
    "exaone-3.5-2.4b": (
        {"architectures": ["ExaoneForCausalLM"], "activation_function": "silu", "head_dim": 80,
         "hidden_size": 2560, "intermediate_size": 7168, "layer_norm_epsilon": 1e-5,
         "max_position_embeddings": 32768, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_layers": 30, "rope_theta": 1e6, "tie_word_embeddings": True, "vocab_size": 102400,
         "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        Shape(2560, 30, 32, 8, 80, 7168, 32768, True),
    ),
    "baichuan2-13b": (
        {"architectures": ["BaichuanForCausalLM"], "hidden_act": "silu", "hidden_size": 5120,
         "intermediate_size": 13696, "model_max_length": 4096, "num_attention_heads": 40,
         "num_hidden_layers": 40, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
         "vocab_size": 125696},
        Shape(5120, 40, 40, 40, 128, 13696, 4096, False),
    ),
    "llama-4-scout": (
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {
            "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": 4,
            "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
            "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
            "rms_norm_eps": 1e-5, "rope_theta": 5e5, "use_qk_norm": True, "vocab_size": 202048,
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}}},
        Shape(5120, 48, 40, 8, 128, 16384, 10485760, False),
    ),
    "minicpm-2b": (
        {"architectures": ["MiniCPMForCausalLM"], "hidden_size": 2304, "intermediate_size": 5760,
         "max_position_embeddings": 4096, "num_attention_heads": 36, "num_hidden_layers": 40,
         "num_key_value_heads": 36, "rms_norm_eps": 1e-5, "vocab_size": 122753,
         "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        Shape(2304, 40, 36, 36, 64, 5760, 4096, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shape_of_a_published_config(name: str) -> None:
    given, shape = PUBLISHED[name]
    config = ModelConfig.from_hf(given)
    assert Shape(*(getattr(config, field) for field in Shape._fields)) == shape


def test_what_shapes_leave_out() -> None:
    def read(name: str) -> ModelConfig:
        return ModelConfig.from_hf(PUBLISHED[name][0])

    def rotary_dim(config: ModelConfig) -> int | None:
        rope = config.layers[0].rope
        return None if rope is None else rope.rotary_dim

    dims = {name: rotary_dim(read(name)) for name in PUBLISHED}
    assert (dims["pythia-1b"], dims["gpt-j-6b"], dims["phi-2"]) == (64, 64, 32)
    assert {n for n, dim in dims.items() if dim is None} == {
        "gpt2", "bloom-560m", "mpt-7b", "starcoder", "opt-125m", "baichuan2-13b"
    }  # fmt: skip
    assert read("falcon-7b").block.wiring == "parallel"
    assert read("falcon-40b").block.wiring == "parallel_two_norms"
    assert read("dbrx").block.qkv_clip == 8.0
    assert read("baichuan2-13b").block.positions == "alibi"
    minicpm = read("minicpm-2b")
    assert minicpm.embedding_scale == 12.0
    assert minicpm.residual_scale == pytest.approx(1.4 / 40**0.5)
    assert minicpm.logits_scale == pytest.approx(256 / 2304)


def test_a_body_saved_without_its_prefix_is_read_too() -> None:
    """GPT-2's own files have names without it, and masks that nobody needs."""
    model = tiny_model("gpt2")
    bare = {name.removeprefix("transformer."): t for name, t in model.tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    config = ModelConfig.from_hf(model.config)
    names = set(under_our_names(config, MemoryCheckpoint(bare)).names())
    assert names - {"model.layers.0.attn.bias"} == set(model.checkpoint().names())


def test_the_head_of_baichuan_2_has_rows_of_length_one() -> None:
    head = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    places = {"lm_head.weight": StoredPlace(("lm_head.weight",), has_unit_rows=True)}
    for dtype in ("F32", "BF16", "F16"):
        stored = MemoryCheckpoint({"lm_head.weight": head}, dtype)
        read = Arranged(stored, places).read("lm_head.weight", (2, 2))
        values = read.data.view(np.float32).reshape(2, 2)
        np.testing.assert_allclose(values, [[0.6, 0.8], [0.0, 1.0]], rtol=1e-6)


def test_baichuan_2_is_known_by_its_vocabulary() -> None:
    given, _ = PUBLISHED["baichuan2-13b"]
    tensors = {"lm_head.weight": torch.full((4, 2), 3.0)}
    for vocabulary, value in ((125696, 0.5**0.5), (64000, 3.0)):
        config = ModelConfig.from_hf(given | {"vocab_size": vocabulary})
        read = under_our_names(config, MemoryCheckpoint(tensors)).read("lm_head.weight", (4, 2))
        np.testing.assert_allclose(read.data.view(np.float32), value, rtol=1e-6)


def test_what_cannot_be_rearranged_is_an_error() -> None:
    class Quantized(MemoryCheckpoint):
        def read(self, name: str, shape: tuple[int, ...]) -> Any:
            import dataclasses

            return dataclasses.replace(super().read(name, shape), dtype="Q8_0")

    stored = Quantized({"w": torch.ones(4, 2)})
    for place, verb in (
        (StoredPlace(("w",), shape=(4, 2), is_transposed=True), "transposed"),
        (StoredPlace(("w",), shape=(4, 2), parts=2), "split"),
        (StoredPlace(("w",), shape=(4, 2), has_unit_rows=True), "normalised"),
        (StoredPlace(("w",), shape=(4, 2), factors=np.ones(4, np.float32)), "multiplied"),
    ):
        with pytest.raises(ModelError, match=f"tensor w of type Q8_0 cannot be {verb}"):
            Arranged(stored, {"ours": place}).read("ours", (2, 2))
