"""A model's shape as one frozen value, read from config.json: what families differ in is data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from octavo_engine.caches import KVSpec, StateSpec
from octavo_engine.models.block import PLAIN, BlockConfig
from octavo_engine.models.families import find_family, text_family
from octavo_engine.models.fields import ConfigFields
from octavo_engine.models.grouped_experts import ExpertChoice, read_routing
from octavo_engine.models.recurrent_config import layers_at
from octavo_engine.models.rope_config import MAX_POSITIONS, read_ropes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.caches import CacheSpec
    from octavo_engine.models.families import Family
    from octavo_engine.models.latent_config import LatentConfig
    from octavo_engine.models.recurrent_config import (
        Mixer,
        Multipliers,
        RecurrentConfig,
        SharedBlocks,
    )
    from octavo_engine.models.rope import RopeConfig
    from octavo_engine.models.rope_config import RopeConfigs
    from octavo_engine.models.speech_config import SpeechConfig
    from octavo_engine.models.streams_config import StreamsConfig
    from octavo_engine.ops import Activation, QueryTemperature

TorchDType = Literal["float32", "float16", "bfloat16"]

# Beyond any model there is; a file that asks for more is broken or hostile.
MAX_VOCABULARY = 1 << 22
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 1024  # the extension's own bounds
MAX_EXPERTS_PER_TOKEN = 64
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class LayerConfig(NamedTuple):
    """What one layer's attention has that another's may not."""

    window: int | None  # tokens it sees, itself included; None: all before it
    rope: RopeConfig | None
    has_experts: bool = False
    mixer: Mixer = "attention"
    has_mlp: bool = True
    is_chunked: bool = False  # the window begins where chunks of its length do
    reads: int | None = None  # the layer before it whose keys and values it attends to; None: own


class ExpertsConfig(NamedTuple):
    """A mixture of experts in place of an MLP."""

    num_experts: int
    top_k: int
    width: int
    renormalise: bool
    shared_width: int = 0  # of the expert that every token meets; 0: there is none
    routing: ExpertChoice = ExpertChoice()
    has_biases: bool = False  # the router, and each matrix of an expert
    weighs_inputs: bool = False  # as in ops.ExpertsSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that a model's page needs to know; checked, so a page need not ask."""

    architecture: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int  # tokens the model was made for
    norm_eps: float
    activation: Activation
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    attention_scale: float  # of q · k
    attention_soft_cap: float | None = None
    temperature: QueryTemperature | None = None  # in layers without rope
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a block adds to the residual
    logits_scale: float = 1.0
    torch_dtype: TorchDType = "float32"  # as the checkpoint was saved
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None  # in place of keys and values of heads
    block: BlockConfig = PLAIN  # of the gpt page
    is_whole: bool = False  # texts are read whole, for a vector or a score: nothing is cached
    speech: SpeechConfig | None = None  # of models that read audio, their encoder
    recurrent: RecurrentConfig | None = None  # of layers that are not attention
    multipliers: Multipliers | None = None  # of a hybrid's parts
    shared_blocks: SharedBlocks | None = None  # of Zamba's layers with attention
    streams: StreamsConfig | None = None  # of a residual of several streams
    is_part: bool = False  # the text part of a model that also sees pictures
    num_deep_rows: int = 0  # layers behind which more of a picture's rows are added

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def caches(self) -> tuple[CacheSpec, ...]:
        """What each layer remembers; one that remembers nothing has none."""
        return tuple(spec for layer in self.layers for spec in self._caches_of(layer))

    def cache_index(self, layer: int, *, of_state: bool = False) -> int:
        """Of a layer's cache among all, or how many there are: of its state where it has keys and
        values besides."""
        source = self.layers[layer].reads if layer < len(self.layers) else None
        if source is not None:
            return self.cache_index(source)
        first = sum(len(self._caches_of(before)) for before in self.layers[:layer])
        if not of_state:
            return first
        own = self._caches_of(self.layers[layer])
        return first + next(i for i, spec in enumerate(own) if isinstance(spec, StateSpec))

    def _caches_of(self, layer: LayerConfig) -> list[CacheSpec]:
        if layer.reads is not None:
            return []
        if self.latent is not None:
            return [self.latent.cache(layer.window)]
        caches: list[CacheSpec] = []
        if layer.mixer in ("attention", "attention+mamba2"):
            caches.append(KVSpec(self.num_kv_heads, self.head_dim, layer.window))
        if layer.mixer not in ("attention", "mlp"):
            assert self.recurrent is not None, "a family with such layers says what they are"
            caches.append(self.recurrent.state(self.hidden_size))
        return caches

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the object of a config.json; raises ModelError that names the field."""
        outer = ConfigFields(config)
        architecture = _architecture(outer)
        family = find_family(architecture)
        part = outer.raw("text_config")
        if part is not None and not isinstance(part, dict):
            raise outer.error("text_config", "must be an object")
        text = config if part is None else {**_shared(config), **part}
        path = "config.json" if part is None else "config.json: text_config"
        family = text_family(ConfigFields(text, path=path), family)
        fields = ConfigFields(text, defaults=family.defaults, aliases=family.aliases, path=path)
        read = _read(cls, fields, family, architecture=architecture, is_part=part is not None)
        deep = len(deep_layers(outer.section("vision_config"), family))
        if deep > read.num_layers:
            raise outer.error("vision_config", f"must have at most {read.num_layers} deep layers")
        return replace(read, num_deep_rows=deep) if deep else read


def deep_layers(vision: ConfigFields | None, family: Family) -> tuple[int, ...]:
    """Of a tower, those whose output the language model reads besides, in its first layers."""
    if vision is None or not family.deep_layers:
        return ()
    layers = vision.raw("deepstack_visual_indexes")
    if layers is None:
        return family.deep_layers
    is_list = isinstance(layers, list | tuple)
    if not is_list or not all(type(i) is int and 0 <= i < MAX_LAYERS for i in layers):
        raise vision.error("deepstack_visual_indexes", "must be a list of layers")
    if list(layers) != sorted(set(layers)):
        raise vision.error("deepstack_visual_indexes", "must be in ascending order")
    return tuple(layers)


def _architecture(fields: ConfigFields) -> str:
    value = fields.raw("architectures")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise fields.error("architectures", "must be a list with the name of a model class")
    return value[0]


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a wrapper says about the text model beside its text_config."""
    names = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
    return {name: config[name] for name in names if name in config}


def _read(
    cls: type[ModelConfig],
    fields: ConfigFields,
    family: Family,
    *,
    architecture: str,
    is_part: bool,
) -> ModelConfig:
    hidden_size = fields.integer("hidden_size", maximum=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_positions = fields.integer("max_position_embeddings", maximum=MAX_POSITIONS)
    attention_bias = fields.boolean("attention_bias")
    common: dict[str, Any] = {
        "architecture": architecture,
        "family": family,
        "vocab_size": fields.integer("vocab_size", maximum=MAX_VOCABULARY),
        "hidden_size": hidden_size,
        "intermediate_size": _intermediate_size(fields, family, hidden_size),
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(fields, num_heads),
        "head_dim": head_dim,
        "experts": _experts(fields, family),
        "max_position_embeddings": max_positions,
        "norm_eps": fields.positive("rms_norm_eps"),
        "activation": _activation(fields),
        "qkv_bias": _qkv_bias(fields, family, attention_bias=attention_bias),
        "output_bias": attention_bias if family.output_bias is None else family.output_bias,
        "mlp_bias": fields.boolean("mlp_bias"),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings"),
        "torch_dtype": read_torch_dtype(fields),
        "bos_token_id": fields.optional_integer("bos_token_id", minimum=0, maximum=MAX_VOCABULARY),
        "eos_token_ids": fields.integers("eos_token_id", maximum=MAX_VOCABULARY),
        "block": family.block,
        "is_part": is_part,
        **_scales(fields, family, hidden_size=hidden_size, head_dim=head_dim),
    }
    common |= family.read(fields, family.block)
    readers = common.pop("readers", {})
    mixers, has_mlp = common.pop("mixers", None), common.pop("has_mlp", True)
    if "layers" in common:
        return cls(**common)
    if common["block"].positions == "rope":
        ropes = read_ropes(fields, family, head_dim=head_dim, max_positions=max_positions)
    else:
        ropes = None
    if mixers is None:
        layers = tuple(
            layer._replace(reads=readers.get(index))
            for index, layer in enumerate(_layers(fields, family, ropes))
        )
    else:
        has_experts = [False] * len(mixers)
        if common["experts"] is not None:
            has_experts = _has_experts(fields, family, len(mixers))
        rope = None if ropes is None else ropes.full
        layers = tuple(
            LayerConfig(None, rope, experts, mixer, has_mlp)
            for experts, mixer in zip(has_experts, mixers, strict=True)
        )
    return cls(**common, layers=layers)


def _intermediate_size(fields: ConfigFields, family: Family, hidden_size: int) -> int:
    if family.page == "gemma3n":  # each layer may have its own
        return max(fields.integers("intermediate_size", maximum=MAX_WIDTH), default=0)
    size = fields.optional_integer("intermediate_size", maximum=MAX_WIDTH)
    if size is None and family.has_mlp_ratio:
        return hidden_size * (fields.optional_integer("expansion_ratio", maximum=64) or 4)
    return fields.integer("intermediate_size", maximum=MAX_WIDTH) if size is None else size


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", maximum=MAX_HEAD_DIM)
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"must be a multiple of {num_heads} attention heads")
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise fields.error("head_dim", f"must be even and at most {MAX_HEAD_DIM} ({head_dim} here)")
    return head_dim


def _num_kv_heads(fields: ConfigFields, num_heads: int) -> int:
    count = fields.optional_integer("num_key_value_heads", maximum=MAX_HEADS) or num_heads
    if num_heads % count:
        raise fields.error("num_key_value_heads", f"must divide {num_heads} attention heads")
    return count


def _qkv_bias(fields: ConfigFields, family: Family, *, attention_bias: bool) -> bool:
    if family.qkv_bias is None:
        return attention_bias
    return family.qkv_bias if fields.raw("qkv_bias") is None else fields.boolean("qkv_bias")


def _activation(fields: ConfigFields) -> Activation:
    name = fields.optional_text("hidden_activation") or fields.optional_text("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise fields.error("hidden_act", f"must be one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def read_torch_dtype(fields: ConfigFields) -> TorchDType:
    spelling = "torch_dtype" if fields.raw("dtype") is None else "dtype"
    name = fields.optional_text(spelling) or "float32"
    for dtype in get_args(TorchDType):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]  # get_args does not know its argument
    raise fields.error(spelling, f"must be one of {', '.join(get_args(TorchDType))}")


def _scales(
    fields: ConfigFields, family: Family, *, hidden_size: int, head_dim: int
) -> dict[str, Any]:
    if family.scales == "granite":
        return {
            "attention_scale": fields.positive("attention_multiplier"),
            "embedding_scale": fields.positive("embedding_multiplier"),
            "residual_scale": fields.positive("residual_multiplier"),
            "logits_scale": 1.0 / fields.positive("logits_scaling"),
        }
    if family.scales == "falcon_h1":
        return {  # a multiplier of keys is as well one of q · k
            "attention_scale": fields.positive("key_multiplier") * head_dim**-0.5,
            "embedding_scale": fields.positive("embedding_multiplier"),
            "logits_scale": fields.positive("lm_head_multiplier"),
        }
    if family.scales == "gemma":
        return {
            "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
            "embedding_scale": hidden_size**0.5,
            "attention_soft_cap": fields.optional_positive("attn_logit_softcapping"),
            "final_soft_cap": fields.optional_positive("final_logit_softcapping"),
        }
    return {"attention_scale": head_dim**-0.5}


def _experts(fields: ConfigFields, family: Family) -> ExpertsConfig | None:
    if family.experts == "none" or fields.raw("num_local_experts") == 0:
        return None
    # The same number, by its older and its newer name.
    spelling = "num_local_experts" if fields.raw("num_local_experts") else "num_experts"
    if family.experts == "grouped":
        spelling = "n_routed_experts"
    count = fields.integer(spelling, maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", maximum=MAX_EXPERTS_PER_TOKEN)
    if top_k > count:
        raise fields.error("num_experts_per_tok", f"must be at most {count}, the experts there are")
    if family.experts == "jamba":
        width = fields.integer("intermediate_size", maximum=MAX_WIDTH)
        return None if count == 1 else ExpertsConfig(count, top_k, width, renormalise=False)
    if family.experts in ("mixtral", "gpt-oss"):
        width = fields.integer("intermediate_size", maximum=MAX_WIDTH)
        biases = family.experts == "gpt-oss"
        return ExpertsConfig(count, top_k, width, renormalise=True, has_biases=biases)
    if family.experts == "llama4":
        width = fields.integer("intermediate_size", maximum=MAX_WIDTH)
        by_sigmoid = ExpertChoice(is_sigmoid=True)
        return ExpertsConfig(count, top_k, width, False, width, by_sigmoid, weighs_inputs=True)
    width = fields.integer("moe_intermediate_size", maximum=MAX_WIDTH)
    if family.experts == "grouped":
        shared = fields.optional_integer("n_shared_experts", minimum=0, maximum=MAX_EXPERTS) or 0
        routing = read_routing(fields, count)
        if top_k > count // routing.num_groups * routing.top_groups:
            raise fields.error(
                "num_experts_per_tok", "must not be more than the chosen groups have"
            )
        # Shares of all experts, whatever the field says, where a softmax makes them.
        renormalise = routing.is_sigmoid and fields.boolean("norm_topk_prob")
        return ExpertsConfig(count, top_k, width, renormalise, shared * width, routing)
    shared_width = 0
    if family.experts == "qwen-shared":
        shared_width = fields.integer("shared_expert_intermediate_size", maximum=MAX_WIDTH)
    return ExpertsConfig(count, top_k, width, fields.boolean("norm_topk_prob"), shared_width)


def _has_experts(fields: ConfigFields, family: Family, num_layers: int) -> list[bool]:
    if family.experts in ("none", "mixtral", "gpt-oss"):
        return [family.experts != "none"] * num_layers
    if family.experts == "grouped":
        kinds = fields.per_layer("mlp_layer_types", num_layers)
        if kinds is not None:
            if any(kind not in ("dense", "sparse") for kind in kinds):
                raise fields.error("mlp_layer_types", "must hold dense and sparse only")
            return [kind == "sparse" for kind in kinds]
        dense = fields.integer("first_k_dense_replace", minimum=0, maximum=MAX_LAYERS)
        return [index >= dense for index in range(num_layers)]
    if family.experts == "jamba":
        return layers_at(fields, "expert_layer", num_layers)
    if family.experts == "llama4":
        step = fields.integer("interleave_moe_layer_step", maximum=MAX_LAYERS)
        if fields.raw("moe_layers") is None:
            return [(index + 1) % step == 0 for index in range(num_layers)]
        own = fields.integers("moe_layers", maximum=MAX_LAYERS)
        return [index in own for index in range(num_layers)]
    step = fields.integer("decoder_sparse_step", maximum=MAX_LAYERS)
    plain = fields.integers("mlp_only_layers", maximum=MAX_LAYERS)
    return [index not in plain and (index + 1) % step == 0 for index in range(num_layers)]


def _layers(
    fields: ConfigFields, family: Family, ropes: RopeConfigs | None
) -> tuple[LayerConfig, ...]:
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if fields.boolean("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "must be false: only causal models")
    has_rope = _has_rope(fields, family, num_layers)
    window = None
    is_chunked = family.windows == "chunks"
    if is_chunked:
        window = fields.optional_integer("attention_chunk_size", maximum=MAX_POSITIONS)
    elif family.windows != "none" and fields.boolean("use_sliding_window"):  # else it may be 0
        window = fields.optional_integer("sliding_window", maximum=MAX_POSITIONS)
    is_local = _is_local(fields, family, num_layers, has_rope)
    if family.global_nope and window is not None:
        has_rope = is_local
    has_experts = _has_experts(fields, family, num_layers)
    return tuple(
        LayerConfig(
            window=window if local else None,
            rope=None if ropes is None or not rope else ropes.local if local else ropes.full,
            has_experts=experts,
            is_chunked=is_chunked and local and window is not None,
        )
        for rope, local, experts in zip(has_rope, is_local, has_experts, strict=True)
    )


def _has_rope(fields: ConfigFields, family: Family, num_layers: int) -> list[bool]:
    if not family.nope:
        return [True] * num_layers
    given = None
    if fields.raw("no_rope_layers") != []:  # as good as left out
        given = fields.per_layer("no_rope_layers", num_layers)
    if given is None:
        interval = fields.integer("no_rope_layer_interval", maximum=MAX_LAYERS)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if any(entry not in (0, 1) for entry in given):
        raise fields.error("no_rope_layers", "must hold 0 and 1 only")
    return [bool(entry) for entry in given]  # NOTE: its 1 means that there is rope


def _is_local(
    fields: ConfigFields, family: Family, num_layers: int, has_rope: list[bool]
) -> list[bool]:
    layers = range(num_layers)
    if family.windows in ("none", "all"):
        return [family.windows == "all"] * num_layers
    given = fields.per_layer("layer_types", num_layers)
    if given is not None:
        of_window = "chunked" if family.windows == "chunks" else "sliding"
        if any(entry not in ("full_attention", f"{of_window}_attention") for entry in given):
            raise fields.error(
                "layer_types", f"must hold full_attention and {of_window}_attention only"
            )
        return [entry != "full_attention" for entry in given]
    if family.windows == "chunks":
        return has_rope
    if family.windows == "upper":
        first = fields.integer("max_window_layers", minimum=0, maximum=MAX_POSITIONS)
        return [index >= first for index in layers]
    if family.windows == "nope":
        return [not rope for rope in has_rope]
    pattern = fields.integer("sliding_window_pattern", maximum=MAX_POSITIONS)
    return [(index + 1) % pattern != 0 for index in layers]
