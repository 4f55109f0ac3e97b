"""The shape of an encoder (BERT and its kin) as one frozen value, read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.models.config import (
    ACTIVATIONS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    LayerConfig,
)
from octavo_engine.models.fields import ConfigFields
from octavo_engine.models.rope import RopeConfig
from octavo_engine.models.rope_config import MAX_POSITIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.ops import Activation

EncoderFamily = Literal["bert", "roberta", "distilbert", "nomic", "modernbert", "gte"]

# Stems of class names: what follows says which head was trained on it.
_STEMS: Mapping[str, EncoderFamily] = MappingProxyType(
    {
        "Bert": "bert",
        "Roberta": "roberta",
        "XLMRoberta": "roberta",
        "Camembert": "roberta",
        "DistilBert": "distilbert",
        "NomicBert": "nomic",
        "ModernBert": "modernbert",
        "Gte": "gte",
        "New": "gte",  # as its makers call it
    }
)
# Encoders and heads that no page of ours computes, and what to do.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        name: reason
        for names, reason in (
            (
                ("XLMRobertaLoRA", "JinaEmbeddingsV3Model"),
                "it is Jina v3, whose vectors need an adapter for each task; use BAAI/bge-m3 or a "
                "Qwen3 Embedding",
            ),
            (
                ("JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"),
                "its attention is biased by distance both ways; use BAAI/bge-m3 or a GTE model",
            ),
            (
                ("HF_ColBERT", "ColBERT"),
                "it is ColBERT in the format of its own code; use a repository in the format of "
                "PyLate, which has a modules.json",
            ),
        )
        for name in names
    }
)
_ENDINGS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")

_BERT = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_DEFAULTS: Mapping[EncoderFamily, Mapping[str, Any]] = MappingProxyType(
    {
        "bert": _BERT,
        "roberta": _BERT | {"pad_token_id": 1, "layer_norm_eps": 1e-12},
        "distilbert": _BERT,
        "nomic": _BERT | {"hidden_act": "silu", "max_position_embeddings": 2048},
        "gte": _BERT
        | {"max_position_embeddings": 8192, "type_vocab_size": 1, "rope_theta": 160000.0},
        "modernbert": {
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
        },
    }
)
# Other spellings of the fields' names.
_SPELLINGS: Mapping[EncoderFamily, Mapping[str, str]] = MappingProxyType(
    {
        "distilbert": {
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_act": "activation",
        },
        "nomic": {
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "layer_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "n_positions",
        },
        "modernbert": {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Everything that an encoder's page needs to know; checked, so a page need not ask."""

    architecture: str
    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int  # tokens of a text; the table of positions has `offset` more rows
    position_offset: int = 0
    has_positions: bool = True  # a table of them; else rope
    num_types: int = 0  # rows of the table of token types; 0: there is none
    norm_eps: float
    norm_bias: bool = True
    activation: Activation
    attention_bias: bool = True
    mlp_bias: bool = True
    down_bias: bool | None = None  # of the MLP's second matrix; None: as the first
    is_gated: bool = False  # the MLP

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def encoder_family(architecture: str) -> EncoderFamily | None:
    """None of a class that is no encoder of ours."""
    for ending in _ENDINGS:
        stem = architecture.removesuffix(ending)
        if stem != architecture:
            return _STEMS.get(stem)
    return None


def known_encoders() -> list[str]:
    return [f"{stem}Model" for stem in _STEMS]


def read_encoder(config: Mapping[str, Any], architecture: str) -> EncoderConfig:
    """Read the object of a config.json; raises ModelError that names the field."""
    family = encoder_family(architecture)
    assert family is not None  # the caller requested it
    spelled = {
        ours: config[theirs]
        for ours, theirs in _SPELLINGS.get(family, {}).items()
        if theirs in config and config.get(ours) is None
    }
    fields = ConfigFields({**config, **spelled}, defaults=_DEFAULTS[family])
    if family != "gte" and fields.raw("position_embedding_type") not in (None, "absolute"):
        raise fields.error("position_embedding_type", "must be absolute: others are not supported")
    if fields.boolean("is_decoder"):
        raise fields.error("is_decoder", "must be false: encoders read texts whole")
    hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_DIM:
        raise fields.error("hidden_size", f"must be a multiple of {num_heads} attention heads")
    head_dim = hidden_size // num_heads
    shared: dict[str, Any] = {
        "architecture": architecture,
        "family": family,
        "vocab_size": fields.integer("vocab_size", maximum=MAX_VOCABULARY),
        "hidden_size": hidden_size,
        "intermediate_size": _width(fields, hidden_size),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "norm_eps": fields.positive("layer_norm_eps"),
    }
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    rows = fields.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    match family:
        case "nomic":
            return _nomic(fields, shared, num_layers, rows)
        case "gte":
            return _gte(fields, shared, num_layers, rows)
        case "modernbert":
            return _modernbert(fields, shared, num_layers, rows)
    offset = 0
    if family == "roberta":
        offset = 1 + fields.integer("pad_token_id", minimum=0, maximum=MAX_VOCABULARY)
        if offset >= rows:
            raise fields.error("max_position_embeddings", f"must be above {offset}")
    return EncoderConfig(
        **shared,
        activation=_activation(fields, fields.text("hidden_act")),
        layers=(LayerConfig(None, None),) * num_layers,
        max_position_embeddings=rows - offset,
        position_offset=offset,
        num_types=0 if family == "distilbert" else _num_types(fields),
    )


def _nomic(
    fields: ConfigFields, shared: dict[str, Any], num_layers: int, rows: int
) -> EncoderConfig:
    """Rope, a gated MLP, no biases; norms come after each block, as in BERT."""
    for name, only in (("prenorm", False), ("use_rms_norm", False), ("parallel_block", False)):
        if fields.boolean(name) is not only:
            raise fields.error(name, f"must be {str(only).lower()}")
    if fields.raw("rotary_emb_fraction") == 0:
        raise fields.error("rotary_emb_fraction", "must be above 0: tables are not supported")
    if fields.boolean("rotary_emb_interleaved"):
        raise fields.error("rotary_emb_interleaved", "must be false")
    if fields.optional_positive("rotary_scaling_factor") is not None:
        raise fields.error("rotary_scaling_factor", "must be null: scaling is not supported")
    given = fields.section("rope_parameters")
    theta = (given.optional_positive("rope_theta") if given is not None else None) or (
        fields.optional_positive("rotary_emb_base") or 10000.0
    )
    share = fields.optional_positive("rotary_emb_fraction") or 1.0
    name = fields.optional_text("activation_function") or fields.text("hidden_act")
    gates: dict[str, Activation] = {"swiglu": "silu", "silu": "silu", "geglu": "gelu"}
    if name not in gates:
        raise fields.error("activation_function", f"must be one of {', '.join(gates)}")
    rope = RopeConfig(theta=theta, rotary_dim=int(shared["head_dim"] * share), max_positions=rows)
    return EncoderConfig(
        **shared,
        activation=gates[name],
        layers=(LayerConfig(None, rope),) * num_layers,
        max_position_embeddings=rows,
        has_positions=False,
        num_types=_num_types(fields),
        attention_bias=fields.boolean("qkv_proj_bias") and fields.raw("n_embd") is not None,
        mlp_bias=fields.boolean("mlp_fc1_bias") and fields.raw("n_embd") is not None,
        is_gated=True,
    )


def _gte(fields: ConfigFields, shared: dict[str, Any], num_layers: int, rows: int) -> EncoderConfig:
    """Rope, a gated MLP; norms come after each block, as in BERT. The same as its makers' code says
    it, under other names."""
    if fields.raw("position_embedding_type") not in (None, "rope"):
        raise fields.error("position_embedding_type", "must be rope")
    for name, only in (("layer_norm_type", "layer_norm"), ("logn_attention_scale", False)):
        if fields.raw(name) not in (None, only):
            raise fields.error(name, f"must be {only}")
    rope = _gte_rope(fields, shared["head_dim"], rows)
    return EncoderConfig(
        **shared,
        activation=_activation(fields, fields.text("hidden_act")),
        layers=(LayerConfig(None, rope),) * num_layers,
        max_position_embeddings=rows,
        has_positions=False,
        num_types=_num_types(fields),
        mlp_bias=False,
        down_bias=True,
        is_gated=True,
    )


def _gte_rope(fields: ConfigFields, head_dim: int, rows: int) -> RopeConfig:
    scaling = fields.section("rope_scaling") or fields.section("rope_parameters")
    theta, kind, factor = fields.positive("rope_theta"), "default", None
    if scaling is not None:
        theta = scaling.optional_positive("rope_theta") or theta
        kind = scaling.optional_text("rope_type") or scaling.optional_text("type") or "default"
        factor = scaling.optional_positive("factor")
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=head_dim, max_positions=rows)
    if kind != "ntk" or factor is None or scaling is None or scaling.raw("mixed_b") is not None:
        raise fields.error("rope_scaling", "must be null, or of type ntk with a factor only")
    # A longer base, and all of it slowed down a little.
    return RopeConfig(
        kind="linear",
        theta=theta * factor,
        rotary_dim=head_dim,
        max_positions=rows,
        factor=factor ** (2 / head_dim),
    )


def _modernbert(
    fields: ConfigFields, shared: dict[str, Any], num_layers: int, rows: int
) -> EncoderConfig:
    """Rope, a gated MLP, norms before each block; most layers see a window, both ways."""
    window = fields.integer("local_attention", maximum=MAX_POSITIONS) // 2 + 1
    given = fields.per_layer("layer_types", num_layers)
    if given is None:
        every = fields.integer("global_attn_every_n_layers", maximum=MAX_LAYERS)
        given = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    full = _modern_rope(fields, shared, rows, "full_attention", "global_rope_theta")
    local = _modern_rope(fields, shared, rows, "sliding_attention", "local_rope_theta")
    kinds = {
        "full_attention": LayerConfig(None, full),
        "sliding_attention": LayerConfig(window, local),
    }
    if any(entry not in kinds for entry in given):
        raise fields.error("layer_types", f"must hold {' and '.join(kinds)} only")
    return EncoderConfig(
        **shared,
        activation=_activation(fields, fields.text("hidden_act")),
        layers=tuple(kinds[entry] for entry in given),
        max_position_embeddings=rows,
        has_positions=False,
        norm_bias=fields.boolean("norm_bias"),
        attention_bias=fields.boolean("attention_bias"),
        mlp_bias=fields.boolean("mlp_bias"),
        is_gated=True,
    )


def _modern_rope(
    fields: ConfigFields, shared: dict[str, Any], rows: int, kind: str, old_name: str
) -> RopeConfig:
    given = fields.section("rope_parameters")
    section = None if given is None else given.section(kind)
    theta = section.optional_positive("rope_theta") if section is not None else None
    return RopeConfig(
        theta=theta or fields.positive(old_name),
        rotary_dim=shared["head_dim"],
        max_positions=rows,
    )


def _width(fields: ConfigFields, hidden_size: int) -> int:
    given = fields.optional_integer("intermediate_size", maximum=MAX_WIDTH)
    return 4 * hidden_size if given is None else given


def _num_types(fields: ConfigFields) -> int:
    return fields.integer("type_vocab_size", minimum=0, maximum=MAX_VOCABULARY)


def _activation(fields: ConfigFields, name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise fields.error("hidden_act", f"must be one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]
