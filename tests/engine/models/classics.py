"""Rows of the families that are configuration of the gpt page, or of Llama's under other names.

What transformers has no class for is made of one that computes the same, its weights and settings
written as the family's own files have them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = dict[str, torch.Tensor]

# How GPT-2's descendants name what others call hidden_size and so on.
GPT2_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
YARN_OF_FULL_LAYERS = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}

# As tiny.FAMILIES.
CLASSICS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**GPT2_SIZES, "n_inner": 96}),
    "gpt2-untied": ("GPT2", {**GPT2_SIZES, "tie_word_embeddings": False}),
    "bigcode": ("GPTBigCode", {**GPT2_SIZES, "n_inner": 96}),
    "bigcode-heads": ("GPTBigCode", {**GPT2_SIZES, "multi_query": False}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt-unbiased": (
        "OPT",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False,
         "activation_function": "gelu"},
    ),
    "neox": ("GPTNeoX", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25,
                                             "rope_type": "default"}}),
    "neox-sequential": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "gptj": ("GPTJ", {**GPT2_SIZES, "n_inner": 96, "rotary_dim": 8}),
    "gptj-whole-heads": ("GPTJ", {**GPT2_SIZES, "rotary_dim": 16}),
    "falcon": ("Falcon", {"ffn_hidden_size": 96}),
    "falcon-new": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96, "bias": True},
    ),
    "falcon-new-one-norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-alibi": (
        "Falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
         "tie_word_embeddings": False,
         # Its eager form adds the biases twice.
         "attn_implementation": "sdpa"},
    ),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "bloom-six-heads": ("Bloom", {"hidden_size": 96, "n_layer": 2, "n_head": 6}),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "mpt-clipped-six-heads": (
        "Mpt",
        {"d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 512,
         "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.3}},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 24}),
    "starcoder2-unbiased": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "phi": ("Phi", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5,
                                        "rope_type": "default"}}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("Nemotron", {"head_dim": 32}),
    "nemotron-biased": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "jais2": ("Jais2", {"head_dim": 16}),
    "jais2-unbiased": (
        "Jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}
    ),
    "vaultgemma": (
        "VaultGemma",
        {"num_hidden_layers": 3, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "flex-olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 32}),
    "granitemoe-shared": (
        "GraniteMoeShared",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
            "intermediate_size": 48, "embedding_multiplier": 12.0, "attention_multiplier": 0.2,
            "residual_multiplier": 0.22, "logits_scaling": 8.0,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-plus": ("Cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 24, "logit_scale": 0.25}),
    "olmo": ("Olmo", {"clip_qkv": 0.8}),
    "olmo-unclipped": ("Olmo", {"tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {"num_hidden_layers": 4, "sliding_window": 24, "rope_parameters": YARN_OF_FULL_LAYERS},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 5e5},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 48,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4-0414": ("Glm4", {"head_dim": 16, "attention_bias": False}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 24}),
    "exaone4-full": (
        "Exaone4",
        {"sliding_window": None, "tie_word_embeddings": True,
         "layer_types": ["full_attention"] * 2},
    ),
    "arcee": ("Arcee", {}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0,
                                "factor": 1.0},
        },
    ),
    "gemma": ("Gemma", {"head_dim": 32}),
    "internlm3": ("InternLM3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
}  # fmt: skip

# Of transformers' classes that are not called {kind}ForCausalLM.
CLASSES = {"GPT2": "GPT2LMHeadModel", "InternLM3": "LlamaForCausalLM",
           "IQuestCoder": "LlamaForCausalLM"}  # fmt: skip
ARCHITECTURES = {"GPT2": "GPT2LMHeadModel"}


class Twin(NamedTuple):
    """A family without a class: the row whose class computes the same, and how its files differ."""

    architecture: str
    kind: str
    fields: dict[str, Any]
    config: Callable[[dict[str, Any]], dict[str, Any]]
    tensors: Callable[[Tensors, dict[str, Any]], Tensors]
    prepare: Callable[[Any], None] = lambda model: None


def renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    result = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    return result


def with_qkv(tensors: Tensors, name: str, join: Callable[..., torch.Tensor]) -> Tensors:
    """q, k and v of each layer as one matrix."""
    result = {n: t for n, t in tensors.items() if not re.search(r"\.[qkv]_proj\.", n)}
    for q_name, q in tensors.items():
        if ".q_proj." in q_name:
            k, v = (tensors[q_name.replace(".q_proj.", f".{part}_proj.")] for part in "kv")
            result[q_name.replace("q_proj", name)] = join(q, k, v)
    return result


def _internlm2(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    def by_head(*parts: torch.Tensor) -> torch.Tensor:
        kv, dim = config["num_key_value_heads"], 16
        grouped = [part.reshape(kv, -1, dim, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 2)

    return renamed(
        with_qkv(tensors, "wqkv", by_head),
        (r"embed_tokens", "tok_embeddings"),
        (r"^lm_head", "output"),
        (r"self_attn\.o_proj", "attention.wo"),
        (r"self_attn", "attention"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"),
        (r"mlp\.down_proj", "feed_forward.w2"),
    )


def _exaone(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    return renamed(
        tensors,
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"^model\.layers", "transformer.h"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"self_attn\.o_proj", "attn.attention.out_proj"),
        (r"self_attn", "attn.attention"),
        (r"gate_proj", "c_fc_0"),
        (r"up_proj", "c_fc_1"),
        (r"down_proj", "c_proj"),
    )


def _baichuan(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    return with_qkv(tensors, "W_pack", lambda *parts: torch.cat(parts))


def without(config: dict[str, Any], *names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names} | changes


def _with_biases_of_distance(model: Any) -> None:
    """Llama without rope, its mask made of ALiBi's biases, as the 13B's own code has them."""
    model.model.rotary_emb.inv_freq.zero_()
    forward = model.forward

    def with_mask(input_ids: torch.Tensor, **others: Any) -> Any:
        count = input_ids.shape[1]
        slopes = torch.tensor([2.0 ** (-2.0 * (head + 1)) for head in range(4)])
        at = torch.arange(count)
        distance = at - at[:, None]
        mask = (slopes[:, None, None] * distance).masked_fill(distance > 0, torch.finfo().min)
        return forward(input_ids=input_ids, attention_mask=mask[None], **others)

    model.forward = with_mask


_EQUAL_HEADS = {"num_key_value_heads": 4}
_PLAIN = ("rope_parameters", "head_dim")

TWINS: dict[str, Twin] = {
    "internlm": Twin(
        "InternLMForCausalLM", "Llama", {"attention_bias": True},
        lambda c: without(c, "attention_bias", "mlp_bias", bias=True),
        lambda tensors, config: tensors,
    ),
    "internlm2": Twin(
        "InternLM2ForCausalLM", "Llama", {},
        lambda c: without(c, "attention_bias", "mlp_bias", bias=False), _internlm2,
    ),
    "exaone": Twin(
        "ExaoneForCausalLM", "Llama", {},
        lambda c: without(
            c, "num_hidden_layers", "rms_norm_eps", "hidden_act",
            num_layers=2, layer_norm_epsilon=c["rms_norm_eps"], activation_function="silu",
        ),
        _exaone,
    ),
    "minicpm": Twin(
        "MiniCPMForCausalLM", "Granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.25,
         "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 4.0, "tie_word_embeddings": True},
        lambda c: without(
            c, "embedding_multiplier", "attention_multiplier", "residual_multiplier",
            "logits_scaling", scale_emb=12, scale_depth=1.4, dim_model_base=16,
        ),
        lambda tensors, config: tensors,
    ),
    "baichuan": Twin(
        "BaichuanForCausalLM", "Llama", _EQUAL_HEADS,
        lambda c: without(c, *_PLAIN, "num_key_value_heads"), _baichuan,
    ),
    "baichuan-13b": Twin(
        "BaichuanForCausalLM", "Llama", _EQUAL_HEADS,
        lambda c: without(
            c, *_PLAIN, "num_key_value_heads", "max_position_embeddings", model_max_length=512
        ),
        _baichuan,
        _with_biases_of_distance,
    ),
}  # fmt: skip
