"""How files name an encoder's weights, and how this package does: BERT's names for all but one."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo_engine.models.encoder_config import EncoderFamily

# Before the body's names where a head was saved with it.
_PREFIXES = ("bert.", "roberta.", "distilbert.", "nomic_bert.", "gte.", "new.", "model.")

# In this order, each at most once.
_RULES: Mapping[EncoderFamily, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "bert": (
            (r"^cls\.predictions\.transform\.LayerNorm\.", "cls.predictions.transform.norm."),
        ),
        "roberta": (
            (r"^lm_head\.dense\.", "cls.predictions.transform.dense."),
            (r"^lm_head\.layer_norm\.", "cls.predictions.transform.norm."),
            (r"^lm_head\.bias$", "cls.predictions.bias"),
        ),
        "modernbert": (),
        "gte": (
            (r"^layers\.", r"encoder.layer."),
            (r"\.(?:attention|self_attn)\.o_proj\.", r".attention.output.dense."),
            (r"\.self_attn\.q_proj\.", r".attention.self.query."),
            (r"\.self_attn\.k_proj\.", r".attention.self.key."),
            (r"\.self_attn\.v_proj\.", r".attention.self.value."),
            (r"\.(?:attn_ln|post_attention_layernorm)\.", r".attention.output.LayerNorm."),
            (r"\.(?:mlp_ln|post_mlp_layernorm)\.", r".output.LayerNorm."),
            (r"\.mlp\.gate_proj\.", r".intermediate.gate."),
            (r"\.mlp\.up_proj\.", r".intermediate.dense."),
            (r"\.mlp\.down_proj\.", r".output.dense."),
        ),
        "distilbert": (
            (r"^vocab_transform\.", "cls.predictions.transform.dense."),
            (r"^vocab_layer_norm\.", "cls.predictions.transform.norm."),
            (r"^vocab_projector\.bias$", "cls.predictions.bias"),
            (r"^transformer\.layer\.", r"encoder.layer."),
            (r"\.attention\.q_lin\.", r".attention.self.query."),
            (r"\.attention\.k_lin\.", r".attention.self.key."),
            (r"\.attention\.v_lin\.", r".attention.self.value."),
            (r"\.attention\.out_lin\.", r".attention.output.dense."),
            (r"\.sa_layer_norm\.", r".attention.output.LayerNorm."),
            (r"\.ffn\.lin1\.", r".intermediate.dense."),
            (r"\.ffn\.lin2\.", r".output.dense."),
            (r"\.output_layer_norm\.", r".output.LayerNorm."),
        ),
        "nomic": (
            (r"^emb_ln\.", r"embeddings.LayerNorm."),
            (r"^(?:encoder\.)?layers\.", r"encoder.layer."),
            (r"\.(?:attn|self_attn)\.(?:out_proj|o_proj)\.", r".attention.output.dense."),
            (r"\.self_attn\.q_proj\.", r".attention.self.query."),
            (r"\.self_attn\.k_proj\.", r".attention.self.key."),
            (r"\.self_attn\.v_proj\.", r".attention.self.value."),
            (r"\.(?:norm1|post_attention_layernorm)\.", r".attention.output.LayerNorm."),
            (r"\.(?:norm2|post_mlp_layernorm)\.", r".output.LayerNorm."),
            (r"\.mlp\.(?:fc12|gate_proj)\.", r".intermediate.gate."),
            (r"\.mlp\.(?:fc11|up_proj)\.", r".intermediate.dense."),
            (r"\.mlp\.(?:fc2|down_proj)\.", r".output.dense."),
        ),
    }
)
# Several matrices, one below the other.
_QKV = re.compile(r"^(encoder\.layer\.\d+\.)(?:attn\.Wqkv|attention\.qkv_proj)\.")
_UP_GATE = re.compile(r"^(encoder\.layer\.\d+\.)mlp\.up_gate_proj\.")


def encoder_rename(family: EncoderFamily) -> Callable[[str], list[str]]:
    """From a stored name to ours; several of a matrix that holds several."""
    rules = [(re.compile(pattern), ours) for pattern, ours in _RULES[family]]

    def rename(name: str) -> list[str]:
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        for pattern, ours in rules:
            name = pattern.sub(ours, name, count=1)
        # As TensorFlow called a norm's weights; old files still do.
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if name == "cls.predictions.bias":  # of the matrix that the table of words is as well
            return ["embeddings.word_embeddings.bias"]
        match = _UP_GATE.match(name)
        if match is not None:
            return [f"{match[1]}intermediate.{part}.weight" for part in ("dense", "gate")]
        match = _QKV.match(name)
        if match is None:
            return [name]
        ending = name[match.end() :]
        return [f"{match[1]}attention.self.{part}.{ending}" for part in ("query", "key", "value")]

    return rename


def decoder_rename(name: str) -> list[str]:
    """Of a decoder's body saved alone, whose names lack the first part."""
    is_head = name.startswith(("model.", "lm_head.", "score."))
    return [name if is_head else f"model.{name}"]
