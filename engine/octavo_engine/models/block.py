"""How a layer of the gpt page is wired, and what families' config.json says of it under names of
their own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from octavo_engine.ops import QueryTemperature

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo_engine.models.fields import ConfigFields

Wiring = Literal["sequential", "parallel", "parallel_two_norms", "norm_after", "norm_around"]
Positions = Literal["rope", "table", "alibi", "none"]
QKNorm = Literal["none", "head", "roped", "own", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Everything of a layer that sizes do not say."""

    # Norms before attention and MLP; before both at once, which are added side by side, one norm or
    # two; behind each; before and behind each.
    wiring: Wiring = "sequential"
    norm: Literal["rms", "layer"] = "layer"
    norm_bias: bool = True  # layer norms only
    norm_weight: bool = True
    norm_offset: float = 0.0  # to add to stored norm weights
    is_gated: bool = False
    positions: Positions = "rope"
    position_offset: int = 0  # of the first token's row in the table
    alibi_scale: float = 1.0
    alibi_order: Literal["ascending", "strided"] = "ascending"  # of head counts that are no power
    has_embedding_norm: bool = False
    # Of each head by one weight, everywhere or in layers with rope, or by weights of its own; or of
    # all heads' columns at once.
    qk_norm: QKNorm = "none"
    qk_norm_kind: Literal["rms", "layer"] = "rms"
    qk_norm_after_rope: bool = False
    qkv_clip: float | None = None
    head_bias: bool = False


PLAIN = BlockConfig()

# What a file says beside its family's row: fields of ModelConfig by name.
Reader: TypeAlias = "Callable[[ConfigFields, BlockConfig], Mapping[str, Any]]"


def no_particulars(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    return {}


def read_gpt2(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "scale_attn_weights", True)
    _must_be(fields, "scale_attn_by_inverse_layer_idx", False)
    _must_be(fields, "add_cross_attention", False)
    return {}


def read_bigcode(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    read_gpt2(fields, block)
    return {"num_kv_heads": 1} if fields.boolean("multi_query") else {}


def read_neox(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    is_parallel = fields.boolean("use_parallel_residual")
    wiring: Wiring = "parallel_two_norms" if is_parallel else "sequential"
    return {"block": _changed(block, wiring=wiring)}


def read_hyperclovax(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "use_post_norm", True)
    scale = fields.optional_positive("attention_multiplier")
    return {
        **({} if scale is None else {"attention_scale": scale}),
        "embedding_scale": fields.positive("embedding_multiplier"),
        "residual_scale": fields.positive("residual_multiplier"),
        "logits_scale": fields.positive("logits_scaling"),  # which multiplies, unlike Granite's
    }


def read_cwm(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    if fields.raw("layer_types") is None:
        raise fields.error("layer_types", "must say which layers have a window")
    return {}


def read_falcon(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    heads, bias = fields.raw("num_attention_heads"), fields.boolean("bias")
    is_new = fields.boolean("new_decoder_architecture")
    wiring: Wiring = "sequential"
    if is_new and fields.optional_integer("num_ln_in_parallel_attn", maximum=2) != 1:
        wiring = "parallel_two_norms"
    elif is_new or fields.boolean("parallel_attn"):
        wiring = "parallel"
    kv_heads = 1 if fields.boolean("multi_query") else heads
    if is_new:
        kv_heads = fields.optional_integer("num_kv_heads", maximum=heads) or heads
        if heads % kv_heads:
            raise fields.error("num_kv_heads", f"must divide {heads} attention heads")
    has_alibi = fields.boolean("alibi")
    # Its biases are added before scores are scaled.
    scale = math.sqrt(heads / fields.raw("hidden_size")) if has_alibi else 1.0
    positions: Positions = "alibi" if has_alibi else "rope"
    return {
        "num_kv_heads": kv_heads,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "block": _changed(block, wiring=wiring, positions=positions, alibi_scale=scale),
    }


def read_bloom(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "apply_residual_connection_post_layernorm", False)
    return {}


def read_mpt(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "attn_config.alibi", True)
    _must_be(fields, "attn_config.qk_ln", False)
    _must_be(fields, "attn_config.prefix_lm", False)
    _must_be(fields, "no_bias", True)
    _must_be(fields, "logit_scale", None)
    bias_max = fields.positive("attn_config.alibi_bias_max")
    if bias_max != 8:
        raise fields.error("attn_config.alibi_bias_max", "must be 8")
    scale = fields.optional_positive("attn_config.softmax_scale")
    clip = fields.optional_positive("attn_config.clip_qkv")
    changes = {} if scale is None else {"attention_scale": scale}
    return {"block": _changed(block, qkv_clip=clip), **changes}


def read_opt(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "do_layer_norm_before", True)
    _must_be(fields, "_remove_final_layer_norm", False)
    _must_be(fields, "layer_norm_elementwise_affine", True)
    width = fields.raw("word_embed_proj_dim")
    if width not in (None, fields.raw("hidden_size")):
        raise fields.error("word_embed_proj_dim", "must be as large as hidden_size")
    bias = fields.boolean("enable_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def read_use_bias(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    """One field for all projections."""
    bias = fields.boolean("use_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def read_phi(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "qk_layernorm", False)
    return {}


def read_stablelm(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    wiring: Wiring = "parallel" if fields.boolean("use_parallel_residual") else "sequential"
    norm: QKNorm = "own" if fields.boolean("qk_layernorm") else "none"
    return {
        "qkv_bias": fields.boolean("use_qkv_bias"),
        "block": _changed(block, wiring=wiring, qk_norm=norm, qk_norm_kind="layer"),
    }


def read_cohere(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    norm: QKNorm = "own" if fields.boolean("use_qk_norm") else "none"
    scale = fields.optional_positive("logit_scale")
    return {
        "logits_scale": 1.0 if scale is None else scale,
        "block": _changed(block, qk_norm=norm, qk_norm_kind="layer"),
    }


def read_clip(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    return {"block": _changed(block, qkv_clip=fields.optional_positive("clip_qkv"))}


def read_olmoe(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "clip_qkv", None)  # it would go between the norm and the rope
    return {}


def read_dbrx(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    _must_be(fields, "ffn_config.moe_normalize_expert_weights", 1)
    return read_clip(fields, block)


def read_gemma(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    """Its first files say gelu and mean the approximation."""
    given = fields.raw("hidden_activation") or fields.raw("hidden_act")
    return {
        "embedding_scale": fields.raw("hidden_size") ** 0.5,
        **({"activation": "gelu_tanh"} if given == "gelu" else {}),
    }


def read_minicpm(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    layers = fields.integer("num_hidden_layers", maximum=1024)
    base = fields.optional_positive("dim_model_base") or fields.raw("hidden_size")
    return {
        "embedding_scale": fields.positive("scale_emb"),
        "residual_scale": fields.positive("scale_depth") / math.sqrt(layers),
        "logits_scale": base / fields.raw("hidden_size"),
    }


def read_baichuan(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    """The 13B has no positions but those of attention, and says so by leaving their number out."""
    positions: Positions = "rope" if fields.has("max_position_embeddings") else "alibi"
    return {"block": _changed(block, positions=positions)}


def read_seed_oss(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    return {"output_bias": fields.boolean("attention_out_bias")}


def read_gpt_oss(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    """`hidden_act` says silu, and the experts clamp, always by these numbers."""
    _must_be(fields, "hidden_act", "silu")
    _must_be(fields, "swiglu_limit", 7.0)
    _must_be(fields, "swiglu_alpha", 1.702)
    return {"activation": "swiglu_clamped"}


def read_llama4(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    changes: dict[str, Any] = {
        "intermediate_size": fields.integer("intermediate_size_mlp", maximum=1 << 20),
        "block": _changed(block, qk_norm="roped" if fields.boolean("use_qk_norm") else "none"),
    }
    if fields.raw("attn_temperature_tuning"):  # published files say 4 and mean yes
        changes["temperature"] = QueryTemperature(
            fields.positive("floor_scale"), fields.positive("attn_scale")
        )
    return changes


def read_internlm3(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    return {"output_bias": fields.boolean("mlp_bias")}


def _changed(block: BlockConfig, **changes: Any) -> BlockConfig:
    return replace(block, **changes)


def _must_be(fields: ConfigFields, name: str, value: object) -> None:
    given = fields.raw(name)
    if given is not None and given != value:
        raise fields.error(name, f"must be {str(value).lower()}: other forms are not supported")
