"""GGUF metadata as the config.json that Hugging Face would have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.gguf import GGUFStrings
from octavo_engine.weights.gguf_fields import GGUFFields
from octavo_engine.weights.gguf_latent import latent_config, yarn_magnitudes
from octavo_engine.weights.gguf_names import ARCHITECTURES, FALCON_WITH_TWO_NORMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.weights.gguf import GGUFFile
    from octavo_engine.weights.gguf_names import Architecture

MAX_LAYERS = 10_000
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


class _Builder(GGUFFields):
    def __init__(self, file: GGUFFile) -> None:
        self._architecture = architecture_of(file)
        super().__init__(file)

    def build(self) -> dict[str, Any]:
        hidden = self.count("embedding_length")
        heads = self.count("attention.head_count")
        layers = self.count("block_count", limit=MAX_LAYERS)
        head_dim = self.number("attention.key_length") or self._default_head_dim(hidden, heads)
        kv_heads = heads
        if self.number("attention.head_count_kv") is not None:
            kv_heads = self.count("attention.head_count_kv")
        if head_dim < 1:
            raise ModelError(
                f"{self.file.path}: heads of size {head_dim} ({hidden} columns, {heads} heads)"
            )
        config: dict[str, Any] = {
            "architectures": [self._architecture.class_name],
            "model_type": self._architecture.model_type,
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": self.count("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.count("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_epsilon")
            or self.required("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base") or 10000.0,
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "attention_bias": self.has("attn_q.bias") or self.has("attn_qkv.bias"),
            "mlp_bias": self.has("ffn_up.bias"),
            "torch_dtype": "bfloat16",
        }
        scaling = self._rope_scaling(config["max_position_embeddings"])
        if scaling is not None:
            config["rope_scaling"] = scaling
        metadata = self.file.metadata
        config["eos_token_id"] = end_token_ids(metadata) or None
        config["bos_token_id"] = _token_id(metadata, "bos_token_id")
        config["pad_token_id"] = _token_id(metadata, "padding_token_id")
        if self._architecture.turns_part and self.prefix != "phi3":
            rotary = self.number("rope.dimension_count") or head_dim
            config["partial_rotary_factor"] = rotary / head_dim
        return (
            config
            | self._particulars(hidden=hidden, heads=heads, layers=layers, head_dim=head_dim)
            | self._classic(kv_heads=kv_heads)
        )

    def _classic(self, *, kv_heads: int) -> dict[str, Any]:
        """What only this architecture has, of those with layer norms."""
        match self.prefix:
            case "starcoder":
                return {"multi_query": kv_heads == 1}
            case "starcoder2":
                return {"use_bias": self.has("attn_output.bias")}
            case "gptneox":
                return {"use_parallel_residual": self.flag("use_parallel_residual")}
            case "falcon":
                is_new = self.has("attn_norm_2.weight")
                return {
                    "new_decoder_architecture": is_new,
                    "num_kv_heads": kv_heads,
                    "multi_query": kv_heads == 1,
                    "bias": self.has("attn_output.bias"),
                    "parallel_attn": not self.has("ffn_norm.weight"),
                }
            case "stablelm":
                return {
                    "use_qkv_bias": self.has("attn_q.bias"),
                    "use_parallel_residual": not self.has("ffn_norm.weight"),
                    "qk_layernorm": self.has("attn_q_norm.weight"),
                }
            case "command-r":
                if self.has("attn_q_norm.weight"):
                    raise ModelError(
                        f"{self.file.path}: a command-r with norms of queries and keys is not "
                        "read from GGUF; use the model's safetensors"
                    )
                return {"logit_scale": self.required("logit_scale")}
        return {}

    def _particulars(
        self, *, hidden: int, heads: int, layers: int, head_dim: int
    ) -> dict[str, Any]:
        """What only this architecture has."""
        window = self.number("attention.sliding_window")
        match self.prefix:
            case "llama" if window:
                return {
                    "architectures": ["MistralForCausalLM"],
                    "model_type": "mistral",
                    "sliding_window": window,
                }
            case "granite":
                return {
                    "attention_multiplier": self.number("attention.scale") or 1.0,
                    "embedding_multiplier": self.number("embedding_scale") or 1.0,
                    "residual_multiplier": self.number("residual_scale") or 1.0,
                    "logits_scaling": self.number("logit_scale") or 1.0,
                }
            case "gpt-oss":
                return {
                    "intermediate_size": self.count("expert_feed_forward_length"),
                    "num_local_experts": self.count("expert_count"),
                    "num_experts_per_tok": self.count("expert_used_count"),
                    "sliding_window": window,
                    "layer_types": [
                        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
                    ],
                }
            case "qwen3moe" | "olmoe":
                is_qwen = self.prefix == "qwen3moe"
                width = "expert_feed_forward_length" if is_qwen else "feed_forward_length"
                return {
                    "moe_intermediate_size": self.count(width),
                    "intermediate_size": self.count(width),
                    "num_experts": self.count("expert_count"),
                    "num_experts_per_tok": self.count("expert_used_count"),
                    "norm_topk_prob": is_qwen,  # of the whole family, and no field of the file
                }
            case "deepseek2":
                return latent_config(self, heads=heads, layers=layers)
            case "smollm3":
                # Not in the file: every fourth layer goes without rope, in all of the family.
                return {
                    "no_rope_layer_interval": 4,
                    "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)],
                }
            case "gemma2" | "gemma3":
                return self._gemma(hidden=hidden, heads=heads, layers=layers, head_dim=head_dim)
            case "phi3":
                rotary = self.number("rope.dimension_count") or head_dim
                original = self.number("rope.scaling.original_context_length")
                return {
                    "partial_rotary_factor": rotary / head_dim,
                    "sliding_window": window,
                    **({"original_max_position_embeddings": original} if original else {}),
                }
        return {}

    def _gemma(self, *, hidden: int, heads: int, layers: int, head_dim: int) -> dict[str, Any]:
        is_27b = layers == _GEMMA_27B_LAYERS[self.prefix]
        every = 2 if self.prefix == "gemma2" else 6
        local_theta = self.number("rope.freq_base_swa")
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": hidden // heads if is_27b else head_dim,
            "sliding_window": self.number("attention.sliding_window") or 4096,
            "layer_types": [
                "full_attention" if (i + 1) % every == 0 else "sliding_attention"
                for i in range(layers)
            ],
            "attn_logit_softcapping": self.number("attn_logit_softcapping"),
            "final_logit_softcapping": self.number("final_logit_softcapping"),
        } | ({"rope_local_base_freq": local_theta or 10000.0} if every == 6 else {})

    def _rope_scaling(self, context: int) -> dict[str, Any] | None:
        original = self.number("rope.scaling.original_context_length")
        long = self._factors("rope_factors_long.weight")
        short = self._factors("rope_factors_short.weight")
        if long is not None and short is not None:
            scaling: dict[str, Any] = {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original or context,
            }
            attention = self.number("rope.scaling.attn_factor")
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
        kind = self.file.metadata.get(f"{self.prefix}.rope.scaling.type")
        if not isinstance(kind, str) or kind not in _NORMAL_TYPES:
            return None
        scaling = {"rope_type": kind, "factor": self.required("rope.scaling.factor")}
        if self.prefix == "gpt-oss":
            scaling["truncate"] = False  # of the whole family, and no field of the file
        elif self.prefix == "deepseek2" and kind == "yarn":
            scaling |= yarn_magnitudes(self)
        return scaling | ({"original_max_position_embeddings": original} if original else {})

    def _factors(self, name: str) -> list[float] | None:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "F32" or len(tensor.shape) != 1:
            raise ModelError(
                f"tensor {name} in {self.file.path} is {tensor.type} {list(tensor.shape)}; "
                "rope factors are a vector of F32"
            )
        factors = self.file.data(tensor).view(np.float32)
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise ModelError(f"tensor {name} in {self.file.path} has factors that are not above 0")
        return [float(factor) for factor in factors]

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        if not self._architecture.turns_part:
            rotary = self.number("rope.dimension_count")
            if rotary:
                return int(rotary)
        return hidden // heads

    def _vocab_size(self) -> int:
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelError(f"tensor token_embd.weight is missing from {self.file.path}")
        return table.shape[0]
