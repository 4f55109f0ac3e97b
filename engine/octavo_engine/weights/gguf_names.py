"""What GGUF calls the tensors of each architecture, and what it did to them on the way."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_COMMON, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FUSED = {**_COMMON, "attn_qkv": "self_attn.qkv_proj"}
_FALCON = {**_FUSED, "attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"}
_OLMO2 = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# A star stands for the number of an expert, of which the file has all in one tensor.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GPT_OSS = {
    **_COMMON,
    **_EXPERTS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
_DEEPSEEK = {
    **_COMMON,
    **_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # newer files have kv_b as these two
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
# Vectors without a module.
_BARE = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")
_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_OUTER = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of general.architecture, in Hugging Face's words."""

    class_name: str
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: _COMMON)
    permutes_heads: bool = False  # q and k rows lie as (pair, half) instead of (half, pair)
    turns_part: bool = False  # its rope may turn a part of a head only
    norm_offset: float = 0.0  # to add to norm weights to have them as Hugging Face does
    other_classes: tuple[str, ...] = ()  # whose models are written so too


ARCHITECTURES: Mapping[str, Architecture] = {
    # Mistral, SmolLM and SmolLM2 are written as llama too.
    "llama": Architecture("LlamaForCausalLM", "llama", permutes_heads=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", permutes_heads=True),
    "granite": Architecture("GraniteForCausalLM", "granite", permutes_heads=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _GEMMA, norm_offset=-1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA, norm_offset=-1.0),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _PHI3, turns_part=True),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_offset=-1.0),
    # Its converter splits what the family's own files hold as one.
    "internlm2": Architecture("LlamaForCausalLM", "llama", permutes_heads=True),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", _FUSED),
    "starcoder": Architecture("GPTBigCodeForCausalLM", "gpt_bigcode", _FUSED),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "starcoder2"),
    "gptneox": Architecture("GPTNeoXForCausalLM", "gpt_neox", _FUSED, turns_part=True),
    "falcon": Architecture("FalconForCausalLM", "falcon", _FUSED),
    "bloom": Architecture("BloomForCausalLM", "bloom", _FUSED),
    "phi2": Architecture("PhiForCausalLM", "phi", turns_part=True),
    "stablelm": Architecture("StableLmForCausalLM", "stablelm", turns_part=True),
    "command-r": Architecture("CohereForCausalLM", "cohere", permutes_heads=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _OLMO2),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", {**_COMMON, **_EXPERTS}),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", {**_COMMON, **_EXPERTS}),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS),
    # The metadata says which class computes it.
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _DEEPSEEK,
        other_classes=("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    ),
}
# Falcon with two norms calls the MLP's by the name of the only one.
FALCON_WITH_TWO_NORMS = Architecture("FalconForCausalLM", "falcon", _FALCON)


def hugging_face_name(name: str, architecture: Architecture) -> str | None:
    """The name Hugging Face gives the tensor, or with a star the tensors of all experts; None if it
    knows none."""
    if match := _LAYER.fullmatch(name):
        index, part, leaf = match.groups()
        known = architecture.layer.get(part)
        if known in _BARE:
            return f"model.layers.{index}.{known}"
        return f"model.layers.{index}.{known}.{leaf}" if known else None
    if match := _OUTER.fullmatch(name):
        part, leaf = match.groups()
        return f"{_TOP[part]}.{leaf}" if part in _TOP else None
    return None


def unpermuted_rows(num_rows: int, num_heads: int) -> NDArray[np.int32]:
    """For each row as Hugging Face orders it, the row of the file that holds it.

    The converter interleaves the two halves of every head: row (half, pair) went to (pair, half).
    """
    rows = np.arange(num_rows, dtype=np.int32)
    half = num_rows // num_heads // 2
    return np.ascontiguousarray(rows.reshape(num_heads, half, 2).swapaxes(1, 2)).reshape(-1)
