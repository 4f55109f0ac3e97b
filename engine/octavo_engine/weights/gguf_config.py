"""GGUF metadata as the config.json that Hugging Face would have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.gguf import GGUFStrings
from octavo_engine.weights.gguf_names import ARCHITECTURES, FALCON_WITH_TWO_NORMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.weights.gguf import GGUFFile
    from octavo_engine.weights.gguf_names import Architecture

MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
_NORMAL_TYPES = {"linear", "yarn"}
_CONTROL = 3  # in tokenizer.ggml.token_type
# Tokens that end a turn. Converters often record only one end token, and not always this one.
_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"})
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # the one size that scales q otherwise


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises ModelError that lists the known ones."""
    name = file.metadata.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise ModelError(
            f"{file.path} has the architecture {name!r:.60}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if name == "falcon" and "blk.0.attn_norm_2.weight" in file.tensors:
        return FALCON_WITH_TWO_NORMS
    return known


# By general.basename, in lower case; the values of the models' own generation_config.json, and for
# SmolLM 2 of its model card.
_SAMPLING: Mapping[str, Mapping[str, float]] = {
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "qwen2.5": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "gemma-3": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}
# By size too: what is right for a family may be too much for its smallest model. With top_p 0.9
# the demo names the capital of France in six of twelve answers, with 0.5 in all.
_SAMPLING_BY_SIZE: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("smollm2", "135m"): {"temperature": 0.2, "top_p": 0.5},
}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's settings under the names of config.json."""
    return _Builder(file).build()


def gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """The end tokens, and for known models what their makers recommend: a GGUF file has no fields
    for sampling defaults."""
    ends = end_token_ids(file.metadata)
    family, size = (
        str(file.metadata.get(f"general.{field}", "")).lower()
        for field in ("basename", "size_label")
    )
    sampling = _SAMPLING_BY_SIZE.get((family, size)) or _SAMPLING.get(family, {})
    return {**sampling, "eos_token_id": ends} if ends else dict(sampling)


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every token that ends an answer, the main one first."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [_token_id(metadata, name) for name in names]
    if isinstance(tokens, GGUFStrings) and isinstance(types, np.ndarray):
        control = np.flatnonzero(types[: len(tokens)] == _CONTROL).tolist()
        ids += [token for token in control if tokens[token] in _TURN_ENDS]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    return value if type(value) is int and value >= 0 else None


class _Builder:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._architecture = architecture_of(file)
        self._prefix = str(file.metadata["general.architecture"])

    def build(self) -> dict[str, Any]:
        hidden = self._count("embedding_length")
        heads = self._count("attention.head_count")
        layers = self._count("block_count", limit=MAX_LAYERS)
        head_dim = self._number("attention.key_length") or self._default_head_dim(hidden, heads)
        kv_heads = heads
        if self._number("attention.head_count_kv") is not None:
            kv_heads = self._count("attention.head_count_kv")
        if head_dim < 1:
            raise ModelError(
                f"{self._file.path}: heads of size {head_dim} ({hidden} columns, {heads} heads)"
            )
        config: dict[str, Any] = {
            "architectures": [self._architecture.class_name],
            "model_type": self._architecture.model_type,
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_epsilon")
            or self._required("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base") or 10000.0,
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "attention_bias": self._has("attn_q.bias") or self._has("attn_qkv.bias"),
            "mlp_bias": self._has("ffn_up.bias"),
            "torch_dtype": "bfloat16",
        }
        scaling = self._rope_scaling(config["max_position_embeddings"])
        if scaling is not None:
            config["rope_scaling"] = scaling
        metadata = self._file.metadata
        config["eos_token_id"] = end_token_ids(metadata) or None
        config["bos_token_id"] = _token_id(metadata, "bos_token_id")
        config["pad_token_id"] = _token_id(metadata, "padding_token_id")
        if self._architecture.turns_part and self._prefix != "phi3":
            rotary = self._number("rope.dimension_count") or head_dim
            config["partial_rotary_factor"] = rotary / head_dim
        return (
            config
            | self._particulars(hidden=hidden, heads=heads, layers=layers, head_dim=head_dim)
            | self._classic(kv_heads=kv_heads)
        )

    def _has(self, tensor: str) -> bool:
        return f"blk.0.{tensor}" in self._file.tensors

    def _flag(self, name: str) -> bool:
        return self._file.metadata.get(f"{self._prefix}.{name}") is True

    def _classic(self, *, kv_heads: int) -> dict[str, Any]:
        """What only this architecture has, of those with layer norms."""
        match self._prefix:
            case "starcoder":
                return {"multi_query": kv_heads == 1}
            case "starcoder2":
                return {"use_bias": self._has("attn_output.bias")}
            case "gptneox":
                return {"use_parallel_residual": self._flag("use_parallel_residual")}
            case "falcon":
                is_new = self._has("attn_norm_2.weight")
                return {
                    "new_decoder_architecture": is_new,
                    "num_kv_heads": kv_heads,
                    "multi_query": kv_heads == 1,
                    "bias": self._has("attn_output.bias"),
                    "parallel_attn": not self._has("ffn_norm.weight"),
                }
            case "stablelm":
                return {
                    "use_qkv_bias": self._has("attn_q.bias"),
                    "use_parallel_residual": not self._has("ffn_norm.weight"),
                    "qk_layernorm": self._has("attn_q_norm.weight"),
                }
            case "command-r":
                if self._has("attn_q_norm.weight"):
                    raise ModelError(
                        f"{self._file.path}: a command-r with norms of queries and keys is not "
                        "read from GGUF; use the model's safetensors"
                    )
                return {"logit_scale": self._required("logit_scale")}
        return {}

    def _particulars(
        self, *, hidden: int, heads: int, layers: int, head_dim: int
    ) -> dict[str, Any]:
        """What only this architecture has."""
        window = self._number("attention.sliding_window")
        match self._prefix:
            case "llama" if window:
                return {
                    "architectures": ["MistralForCausalLM"],
                    "model_type": "mistral",
                    "sliding_window": window,
                }
            case "granite":
                return {
                    "attention_multiplier": self._number("attention.scale") or 1.0,
                    "embedding_multiplier": self._number("embedding_scale") or 1.0,
                    "residual_multiplier": self._number("residual_scale") or 1.0,
                    "logits_scaling": self._number("logit_scale") or 1.0,
                }
            case "gpt-oss":
                return {
                    "intermediate_size": self._count("expert_feed_forward_length"),
                    "num_local_experts": self._count("expert_count"),
                    "num_experts_per_tok": self._count("expert_used_count"),
                    "sliding_window": window,
                    "layer_types": [
                        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
                    ],
                }
            case "qwen3moe" | "olmoe":
                is_qwen = self._prefix == "qwen3moe"
                width = "expert_feed_forward_length" if is_qwen else "feed_forward_length"
                return {
                    "moe_intermediate_size": self._count(width),
                    "intermediate_size": self._count(width),
                    "num_experts": self._count("expert_count"),
                    "num_experts_per_tok": self._count("expert_used_count"),
                    "norm_topk_prob": is_qwen,  # of the whole family, and no field of the file
                }
            case "smollm3":
                # Not in the file: every fourth layer goes without rope, in all of the family.
                return {
                    "no_rope_layer_interval": 4,
                    "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)],
                }
            case "gemma2" | "gemma3":
                is_27b = layers == _GEMMA_27B_LAYERS[self._prefix]
                every = 2 if self._prefix == "gemma2" else 6
                local_theta = self._number("rope.freq_base_swa")
                return {
                    "hidden_activation": "gelu_pytorch_tanh",
                    "query_pre_attn_scalar": hidden // heads if is_27b else head_dim,
                    "sliding_window": window or 4096,
                    "layer_types": [
                        "full_attention" if (i + 1) % every == 0 else "sliding_attention"
                        for i in range(layers)
                    ],
                    "attn_logit_softcapping": self._number("attn_logit_softcapping"),
                    "final_logit_softcapping": self._number("final_logit_softcapping"),
                } | ({"rope_local_base_freq": local_theta or 10000.0} if every == 6 else {})
            case "phi3":
                rotary = self._number("rope.dimension_count") or head_dim
                original = self._number("rope.scaling.original_context_length")
                return {
                    "partial_rotary_factor": rotary / head_dim,
                    "sliding_window": window,
                    **({"original_max_position_embeddings": original} if original else {}),
                }
        return {}

    def _rope_scaling(self, context: int) -> dict[str, Any] | None:
        original = self._number("rope.scaling.original_context_length")
        long = self._factors("rope_factors_long.weight")
        short = self._factors("rope_factors_short.weight")
        if long is not None and short is not None:
            scaling: dict[str, Any] = {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original or context,
            }
            attention = self._number("rope.scaling.attn_factor")
            return scaling | ({"attention_factor": attention} if attention else {})
        freqs = self._factors("rope_freqs.weight")
        if freqs is not None:
            # Llama 3's scaling arrives as the divisors it comes to; longrope is how config.json
            # spells divisors, here the same ones for any length.
            return {
                "rope_type": "longrope",
                "long_factor": freqs,
                "short_factor": freqs,
                "attention_factor": 1.0,
                "original_max_position_embeddings": context,
            }
        kind = self._file.metadata.get(f"{self._prefix}.rope.scaling.type")
        if not isinstance(kind, str) or kind not in _NORMAL_TYPES:
            return None
        scaling = {"rope_type": kind, "factor": self._required("rope.scaling.factor")}
        if self._prefix == "gpt-oss":
            scaling["truncate"] = False  # of the whole family, and no field of the file
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _factors(self, name: str) -> list[float] | None:
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "F32" or len(tensor.shape) != 1:
            raise ModelError(
                f"tensor {name} in {self._file.path} is {tensor.type} {list(tensor.shape)}; "
                "rope factors are a vector of F32"
            )
        factors = self._file.data(tensor).view(np.float32)
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise ModelError(f"tensor {name} in {self._file.path} has factors that are not above 0")
        return [float(factor) for factor in factors]

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        if not self._architecture.turns_part:
            rotary = self._number("rope.dimension_count")
            if rotary:
                return int(rotary)
        return hidden // heads

    def _vocab_size(self) -> int:
        table = self._file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelError(f"tensor token_embd.weight is missing from {self._file.path}")
        return table.shape[0]

    def _count(self, name: str, *, limit: int = MAX_SIZE) -> int:
        value = self._required(name)
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelError(
                f"{self._file.path}: metadata {self._prefix}.{name} must be a whole number from 1 "
                f"to {limit}; got {value}"
            )
        return value

    def _required(self, name: str) -> int | float:
        value: int | float | None = self._number(name)
        if value is None:
            raise ModelError(f"{self._file.path}: metadata {self._prefix}.{name} is missing")
        return value

    def _number(self, name: str) -> Any:
        """An int or a float; None if absent. An array whose entries agree counts as one number."""
        key = f"{self._prefix}.{name}"
        value = self._file.metadata.get(key)
        if isinstance(value, np.ndarray) and value.ndim == 1 and len(value):
            if np.any(value != value[0]):
                raise ModelError(
                    f"{self._file.path}: metadata {key} differs from layer to layer, "
                    "which no supported model does"
                )
            value = value[0].item()
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(f"{self._file.path}: metadata {key} is not a number: {value!r:.40}")
        return value
