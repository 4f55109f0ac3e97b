"""What each family's config.json leaves unsaid: one row a family."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo_engine.errors import ModelError
from octavo_engine.models import block as b
from octavo_engine.models import recurrent_config as r
from octavo_engine.models.block import BlockConfig
from octavo_engine.models.grouped_experts import read_deepseek, read_glm_moe
from octavo_engine.models.plugins import find_plugin, plugin_architectures
from octavo_engine.models.speech_config import read_speech
from octavo_engine.models.streams_config import read_gemma3n

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.block import Reader
    from octavo_engine.models.fields import ConfigFields
    from octavo_engine.ops import Loader, Model

Naming = Literal[
    "llama", "gpt2", "neox", "gptj", "falcon", "bloom", "mpt", "bigcode", "starcoder2", "opt",
    "phi", "stablelm", "dbrx", "glm4", "exaone", "internlm2", "baichuan", "hunyuan", "granitemoe",
    "hyperclovax", "lfm2", "mamba2", "falcon_mamba", "nemotron_h", "granite_hybrid", "bamba",
    "zamba2", "jamba", "vaultgemma", "qwen3_next", "qwen3_5", "llama4", "whisper", "gpt_oss",
    "gemma3n",
]  # fmt: skip


class Page(Protocol):
    """A model's class: made of its ModelConfig, its weights and the longest sequence to serve."""

    def __call__(self, config: Any, loader: Loader, max_model_len: int, /) -> Model: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to read a family's config.json, and on which page of this package it is written."""

    # Of this package, or another's.
    page: Literal["llama", "gemma", "gemma3n", "gpt", "hybrid", "whisper", "zamba"] | Page = "llama"
    block: BlockConfig = b.PLAIN  # of the gpt page
    # The family's own names for fields that others share; a dot leads into an object.
    aliases: Mapping[str, str] = field(default_factory=dict)
    read: Reader = b.no_particulars
    naming: Naming = "llama"  # how its files name weights, and in which order rows lie
    turns_neighbours: bool = False  # rope's pairs are (2 i, 2 i + 1) of a head
    qkv_bias: bool | None = None  # None: as `attention_bias` says
    output_bias: bool | None = None
    qk_norm: bool = False
    fused_qkv: bool = False  # qkv_proj is stored as one matrix
    fused_gate_up: bool = False
    has_mlp_ratio: bool = False  # an MLP is 4 times as wide unless the file says otherwise
    scales: Literal["plain", "granite", "gemma", "falcon_h1"] = "plain"
    # Which layers see only a window: all; from `max_window_layers` on; those without rope; all but
    # every `sliding_window_pattern`-th. A list `layer_types` overrules the last three.
    # chunks: those with rope, from where chunks of `attention_chunk_size` begin.
    windows: Literal["none", "all", "upper", "nope", "pattern", "chunks"] = "none"
    nope: bool = False  # some layers have no rope
    global_nope: bool = False  # where some layers have a window, the others have no rope
    local_rope: bool = False  # layers with a window have a rope of their own
    yarn_is_longrope: bool = False  # an old spelling
    # Pairs of rope turn by time, line or column of a picture's token, one axis behind the other or
    # in turn; for text all three are the same.
    axes: Literal["none", "behind", "in turn"] = "none"
    # Of a tower inside, those whose output is read besides, where the file does not say; else none.
    deep_layers: tuple[int, ...] = ()
    # How a mixture of experts names its parts and weighs them; shared: one more sees every token.
    # grouped: chosen by groups or sigmoids, in layers behind `first_k_dense_replace` plain ones.
    # gpt-oss: as mixtral, with biases. jamba: in some of a number of layers. llama4: by sigmoids,
    # which multiply what experts take.
    experts: Literal[
        "none", "mixtral", "qwen", "qwen-shared", "grouped", "gpt-oss", "jamba", "llama4"
    ] = "none"
    has_sinks: bool = False  # each head has a score more in its softmax, of no value
    # Classes of language models inside one that sees, by the `model_type` of its text_config.
    inside: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def find_family(architecture: str) -> Family:
    """The family of an architecture, by its name in config.json."""
    if architecture in _REFUSED:
        raise ModelError(
            f"config.json: architecture {architecture!r} is not supported: {_REFUSED[architecture]}"
        )
    if architecture not in FAMILIES:
        plugin = find_plugin(architecture, Family)
        if plugin is not None:
            return plugin
        known = ", ".join(sorted({*FAMILIES, *plugin_architectures()}))
        raise ModelError(
            f"config.json: architecture {architecture!r} is not supported; supported are: {known}"
        )
    return FAMILIES[architecture]


def text_family(fields: ConfigFields, family: Family) -> Family:
    """Of a text_config inside a model that sees: the family that it names, which has none of its
    own. Raises ModelError where that cannot be inside this one."""
    if not family.inside:
        return family
    kind = fields.optional_text("model_type") or next(iter(family.inside))
    if kind not in family.inside:
        known = ", ".join(family.inside)
        raise fields.error("model_type", f"must be one of {known}, inside this model")
    own = FAMILIES[family.inside[kind]]
    unsaid = _SEVEN_B.get(kind, {})
    return replace(own, defaults={**unsaid, **own.defaults, **family.defaults})


_QWEN = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_sliding_window": True,
    "tie_word_embeddings": True,
}
_GEMMA2 = _GEMMA | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_QWEN2 = Family(qkv_bias=True, output_bias=False, windows="upper", defaults=_QWEN)
_QWEN2_VL = replace(_QWEN2, axes="behind")  # its text part
_QWEN3_VL = Family(  # as well
    qk_norm=True,
    axes="in turn",
    deep_layers=(8, 16, 24),
    defaults=_QWEN | {"head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 5e5},
)
_LLAMA = Family(defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048})
# What files leave out that have a language model of 7B inside.
_SEVEN_B: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
        "mistral": {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        },
    }
)
_INSIDE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAVA_TEXT = Family(inside=_INSIDE)
_MISTRAL3_TEXT = Family(inside={"mistral": _INSIDE["mistral"]})
_INTERNVL_TEXT = Family(inside={"qwen2": _INSIDE["qwen2"], **_INSIDE})
_QWEN2_AUDIO_TEXT = Family(
    inside={"qwen2": _INSIDE["qwen2"]},
    defaults={  # published files leave them out
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151_936,
    },
)
_SMOLVLM_TEXT = Family(
    inside={"llama": "LlamaForCausalLM"},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 16384},
)
_LLAMA4 = Family(
    naming="llama4",
    turns_neighbours=True,
    nope=True,
    windows="chunks",
    experts="llama4",
    read=b.read_llama4,
    defaults={
        "rms_norm_eps": 1e-5,
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096 * 32,
        "rope_theta": 5e5,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
)
_GEMMA3_FAMILY = Family(
    page="gemma", scales="gemma", windows="pattern", qk_norm=True, local_rope=True, defaults=_GEMMA3
)
_GEMMA3N = Family(
    page="gemma3n",
    naming="gemma3n",
    scales="gemma",
    windows="pattern",
    qk_norm=True,
    local_rope=True,
    read=read_gemma3n,
    defaults=_GEMMA3
    | {
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "query_pre_attn_scalar": 1,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
    },
)
_QWEN3_NEXT = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_QWEN3_5 = Family(
    page="hybrid",
    block=BlockConfig(is_gated=True, norm_offset=1.0),
    naming="qwen3_5",
    qk_norm=True,
    axes="in turn",
    read=r.read_qwen3_next,
    defaults=_QWEN3_NEXT
    | {
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    experts="qwen-shared",
    defaults=_QWEN3_NEXT
    | {
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "intermediate_size": 512,  # of no layer: all have experts
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
)
_WHISPER = Family(
    page="whisper",
    naming="whisper",
    block=BlockConfig(positions="table"),
    read=read_speech,
    aliases={
        "hidden_size": "d_model",
        "intermediate_size": "decoder_ffn_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
        "max_position_embeddings": "max_target_positions",
        "hidden_act": "activation_function",
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "max_position_embeddings": 448,
    },
)
_GRANITE = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_BAMBA = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_GLM = {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_BAICHUAN = Family(
    page="gpt",
    block=BlockConfig(norm="rms", is_gated=True),
    naming="baichuan",
    fused_qkv=True,
    aliases={"max_position_embeddings": "model_max_length"},
    read=b.read_baichuan,
    defaults={"rms_norm_eps": 1e-6},
)

_DEEPSEEK = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "topk_method": "greedy",
}


def _deepseek(**defaults: Any) -> Family:
    return Family(
        experts="grouped",
        # What turns is all that its rope knows of a head.
        aliases={"head_dim": "qk_rope_head_dim"},
        read=read_deepseek,
        defaults=_DEEPSEEK | defaults,
    )


_DEEPSEEK_V3 = _deepseek(
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    n_group=8,
    topk_group=4,
)

# Of experts that sigmoids and a learned bias choose, where config.json leaves it out.
_SIGMOID_EXPERTS = {
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}

# Formats that only code beside the weights can read, or that no page can, and what to do.
_GLM_CODE = "it is GLM in the format of its own code; use a repository whose name ends in -hf"
_LATER = "it is {} in the format of its own code; use a later revision of the repository ({})"
_REFUSED = {
    "ChatGLMModel": _GLM_CODE,
    "ChatGLMForConditionalGeneration": _GLM_CODE,
    "InternVLChatModel": (
        "it is InternVL in the format of its own code; use a repository whose name ends in -hf"
    ),
    "QWenLMHeadModel": "it is Qwen 1 in the format of its own code; use Qwen 1.5 or later",
    "RWForCausalLM": _LATER.format("Falcon", "FalconForCausalLM"),
    "MixFormerSequentialForCausalLM": _LATER.format("Phi", "PhiForCausalLM"),
    "StableLMEpochForCausalLM": _LATER.format("StableLM", "StableLmForCausalLM"),
    "MiniCPM3ForCausalLM": "it has latent attention; use MiniCPM 1 or 2",
}

# Fields that GPT-2's descendants name as it does.
_GPT2_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}
_BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}
_TABLE = BlockConfig(positions="table")
_RMS = BlockConfig(norm="rms", is_gated=True)

# Layer norms, plain MLPs, positions of all kinds.
_GPT: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        page="gpt",
        block=_TABLE,
        naming="gpt2",
        fused_qkv=True,
        has_mlp_ratio=True,
        aliases=_GPT2_FIELDS,
        read=b.read_gpt2,
        defaults=_BIASED
        | {
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
        },
    ),
    "GPTBigCodeForCausalLM": Family(
        page="gpt",
        block=_TABLE,
        naming="bigcode",
        fused_qkv=True,
        has_mlp_ratio=True,
        aliases=_GPT2_FIELDS,
        read=b.read_bigcode,
        defaults=_BIASED
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "multi_query": True,
        },
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "JambaForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True, positions="none"),
        naming="jamba",
        qkv_bias=False,
        output_bias=False,
        experts="jamba",
        read=r.read_jamba,
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_expand": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
    "Lfm2MoeForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True),
        naming="lfm2",
        qk_norm=True,
        experts="grouped",
        aliases={
            "rms_norm_eps": "norm_eps",
            "tie_word_embeddings": "tie_embedding",
            "n_routed_experts": "num_experts",
            "first_k_dense_replace": "num_dense_layers",
        },
        read=r.read_lfm2_moe,
        defaults=_SIGMOID_EXPERTS
        | {
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "first_k_dense_replace": 2,
            "use_expert_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "Lfm2ForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True),
        naming="lfm2",
        qk_norm=True,
        aliases={
            "rms_norm_eps": "norm_eps",
            "intermediate_size": "block_ff_dim",
            "tie_word_embeddings": "tie_embedding",
        },
        read=r.read_lfm2,
        defaults={
            "rms_norm_eps": 1e-5,
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "rope_theta": 1e6,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "tie_word_embeddings": True,
        },
    ),
    "FalconMambaForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(positions="none"),
        naming="falcon_mamba",
        aliases={"rms_norm_eps": "layer_norm_epsilon"},
        read=r.read_falcon_mamba,
        defaults={
            "rms_norm_eps": 1e-5,
            "expand": 2,
            "state_size": 16,
            "conv_kernel": 4,
            "time_step_rank": "auto",
            "use_conv_bias": True,
            "mixer_rms_eps": 1e-6,
            "tie_word_embeddings": True,
            # As below.
            "num_attention_heads": 1,
            "intermediate_size": 1,
            "max_position_embeddings": 1 << 18,
        },
    ),
    "MambaForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(positions="none"),
        naming="mamba2",
        aliases={"rms_norm_eps": "layer_norm_epsilon"},
        read=r.read_mamba,
        defaults={
            "rms_norm_eps": 1e-5,
            "expand": 2,
            "state_size": 16,
            "conv_kernel": 4,
            "time_step_rank": "auto",
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            # As below.
            "num_attention_heads": 1,
            "intermediate_size": 1,
            "max_position_embeddings": 1 << 18,
        },
    ),
    "Mamba2ForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(positions="none"),
        naming="mamba2",
        aliases={"rms_norm_eps": "layer_norm_epsilon"},
        read=r.read_mamba2,
        defaults={
            "rms_norm_eps": 1e-5,
            "expand": 2,
            "num_heads": 128,
            "head_dim": 64,
            "n_groups": 8,
            "state_size": 128,
            "conv_kernel": 4,
            "use_conv_bias": True,
            # It has none of these; pages ask for them all the same.
            "num_attention_heads": 1,
            "intermediate_size": 1,
            "max_position_embeddings": 1 << 18,
        },
    ),
    "GraniteMoeHybridForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True),
        naming="granite_hybrid",
        scales="granite",
        experts="mixtral",
        fused_gate_up=True,
        read=r.read_granite_hybrid,
        defaults=_GRANITE
        | {
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "num_experts_per_tok": 2,
        },
    ),
    "Zamba2ForCausalLM": Family(
        page="zamba",
        block=BlockConfig(is_gated=True),
        naming="zamba2",
        has_mlp_ratio=True,
        aliases={"head_dim": "attention_head_dim", "mlp_bias": "add_bias_linear"},
        read=r.read_zamba2,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "max_position_embeddings": 4096,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "time_step_min": 0.001,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "tie_word_embeddings": True,
        },
    ),
    "NemotronHForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(positions="none"),
        naming="nemotron_h",
        aliases={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
        output_bias=False,
        qkv_bias=False,
        read=r.read_nemotron_h,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "time_step_min": 0.001,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
        },
    ),
    "BambaForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True),
        naming="bamba",
        read=r.read_bamba,
        defaults=_BAMBA | {"max_position_embeddings": 1 << 18, "partial_rotary_factor": 0.5},
    ),
    "FalconH1ForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True),
        naming="bamba",
        scales="falcon_h1",
        read=r.read_falcon_h1,
        defaults=_BAMBA
        | {
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "key_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": 1.0,
        },
    ),
    "Qwen3NextForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True, norm_offset=1.0),
        naming="qwen3_next",
        qk_norm=True,
        experts="qwen-shared",
        read=r.read_qwen3_next,
        defaults=_QWEN3_NEXT,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "OPTForCausalLM": Family(
        page="gpt",
        block=BlockConfig(positions="table", position_offset=2),
        naming="opt",
        aliases={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        read=b.read_opt,
        defaults={
            "hidden_act": "relu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "enable_bias": True,
        },
    ),
    "GPTNeoXForCausalLM": Family(
        page="gpt",
        naming="neox",
        fused_qkv=True,
        aliases={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        read=b.read_neox,
        defaults=_BIASED
        | {"hidden_act": "gelu", "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    ),
    "GPTJForCausalLM": Family(
        page="gpt",
        block=BlockConfig(wiring="parallel", head_bias=True),
        naming="gptj",
        turns_neighbours=True,
        has_mlp_ratio=True,
        qkv_bias=False,
        output_bias=False,
        aliases=_GPT2_FIELDS,
        defaults=_BIASED | {"hidden_act": "gelu_new", "rotary_dim": 64},
    ),
    "FalconForCausalLM": Family(
        page="gpt",
        naming="falcon",
        fused_qkv=True,
        has_mlp_ratio=True,
        aliases={
            "rms_norm_eps": "layer_norm_epsilon",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
        },
        read=b.read_falcon,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "multi_query": True,
            "parallel_attn": True,
            "tie_word_embeddings": True,
        },
    ),
    "BloomForCausalLM": Family(
        page="gpt",
        block=BlockConfig(positions="alibi", has_embedding_norm=True),
        naming="bloom",
        fused_qkv=True,
        has_mlp_ratio=True,
        aliases={
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        read=b.read_bloom,
        defaults=_BIASED
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
    "MptForCausalLM": Family(
        page="gpt",
        block=BlockConfig(positions="alibi", norm_bias=False, alibi_order="strided"),
        naming="mpt",
        fused_qkv=True,
        has_mlp_ratio=True,
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        read=b.read_mpt,
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "attn_config.alibi_bias_max": 8,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        page="gpt",
        naming="starcoder2",
        windows="all",
        aliases={"rms_norm_eps": "norm_epsilon"},
        read=b.read_use_bias,
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "use_bias": True,
            "use_sliding_window": True,
            "tie_word_embeddings": True,
        },
    ),
    "PhiForCausalLM": Family(
        page="gpt",
        block=BlockConfig(wiring="parallel", head_bias=True),
        naming="phi",
        aliases={"rms_norm_eps": "layer_norm_eps"},
        read=b.read_phi,
        defaults=_BIASED
        | {
            "hidden_act": "gelu_new",
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.5,
        },
    ),
    "StableLmForCausalLM": Family(
        page="gpt",
        block=BlockConfig(is_gated=True),
        naming="stablelm",
        output_bias=False,
        aliases={"rms_norm_eps": "layer_norm_eps"},
        read=b.read_stablelm,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
        },
    ),
    "NemotronForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm_offset=1.0),
        aliases={"rms_norm_eps": "norm_eps"},
        defaults={
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
        },
    ),
    "Jais2ForCausalLM": Family(
        page="gpt",
        aliases={"rms_norm_eps": "layer_norm_eps"},
        defaults={
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "VaultGemmaForCausalLM": Family(  # Gemma 2 without norms behind attention and MLP
        page="gpt",
        block=BlockConfig(norm="rms", norm_offset=1.0, is_gated=True),
        naming="vaultgemma",
        scales="gemma",
        windows="pattern",
        defaults=_GEMMA2,
    ),
    "CohereForCausalLM": Family(
        page="gpt",
        block=BlockConfig(wiring="parallel", norm_bias=False, is_gated=True),
        turns_neighbours=True,
        aliases={"rms_norm_eps": "layer_norm_eps"},
        read=b.read_cohere,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
        },
    ),
    "Cohere2ForCausalLM": Family(
        page="gpt",
        block=BlockConfig(wiring="parallel", norm_bias=False, is_gated=True),
        turns_neighbours=True,
        windows="pattern",
        global_nope=True,
        aliases={"rms_norm_eps": "layer_norm_eps"},
        read=b.read_cohere,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_sliding_window": True,
        },
    ),
    "OlmoForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm_weight=False, norm_bias=False, is_gated=True),
        read=b.read_clip,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "DbrxForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm_bias=False, is_gated=True),
        naming="dbrx",
        fused_qkv=True,
        experts="mixtral",
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "num_key_value_heads": "attn_config.kv_n_heads",
            "rope_theta": "attn_config.rope_theta",
            "clip_qkv": "attn_config.clip_qkv",
            "intermediate_size": "ffn_config.ffn_hidden_size",
            "num_local_experts": "ffn_config.moe_num_experts",
            "num_experts_per_tok": "ffn_config.moe_top_k",
            "hidden_act": "ffn_config.ffn_act_fn.name",
        },
        read=b.read_dbrx,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "OlmoeForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, qk_norm="row"),
        experts="qwen",
        aliases={"moe_intermediate_size": "intermediate_size"},
        read=b.read_olmoe,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
    "FlexOlmoForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, wiring="norm_after", qk_norm="row"),
        experts="qwen",
        aliases={"moe_intermediate_size": "intermediate_size"},
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "rope_theta": 5e5,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
    "HyperCLOVAXForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, wiring="norm_around"),
        naming="hyperclovax",
        read=b.read_hyperclovax,
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "use_post_norm": True,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "ArceeForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms"),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    "Olmo2ForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, wiring="norm_after", qk_norm="row"),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "Olmo3ForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, wiring="norm_after", qk_norm="row"),
        windows="pattern",
        local_rope=True,
        aliases={"rope_local_base_freq": "rope_theta"},
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_sliding_window": True,
        },
    ),
    "Exaone4ForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, wiring="norm_after", qk_norm="head"),
        windows="pattern",
        global_nope=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_sliding_window": True,
        },
    ),
    "Glm4ForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, wiring="norm_around"),
        naming="glm4",
        turns_neighbours=True,
        fused_gate_up=True,
        output_bias=False,
        defaults=_GLM,
    ),
    "GemmaForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, norm_offset=1.0),
        read=b.read_gemma,
        defaults={
            "rms_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh",
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        page="gpt",
        block=BlockConfig(norm="rms", is_gated=True, qk_norm="head", qk_norm_after_rope=True),
        naming="hunyuan",
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "BaichuanForCausalLM": _BAICHUAN,
    "BaiChuanForCausalLM": _BAICHUAN,
}
_GPT["MPTForCausalLM"] = _GPT["MptForCausalLM"]  # as its makers spell it

# Llama's page under other names.
_LIKE_LLAMA: dict[str, Family] = {
    "GlmForCausalLM": Family(
        turns_neighbours=True, fused_gate_up=True, output_bias=False, defaults=_GLM
    ),
    "InternLMForCausalLM": Family(
        aliases={"attention_bias": "bias"},
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "bias": True},
    ),
    "InternLM2ForCausalLM": Family(
        naming="internlm2",
        fused_qkv=True,
        aliases={"attention_bias": "bias"},
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    ),
    "InternLM3ForCausalLM": Family(
        aliases={"mlp_bias": "bias", "attention_bias": "qkv_bias"},
        read=b.read_internlm3,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
        },
    ),
    "MiniCPMForCausalLM": Family(
        read=b.read_minicpm,
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "scale_emb": 1,
            "scale_depth": 1,
            "tie_word_embeddings": True,
        },
    ),
    "ExaoneForCausalLM": Family(
        naming="exaone",
        aliases={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "SeedOssForCausalLM": Family(
        read=b.read_seed_oss,
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
        },
    ),
    "Ernie4_5ForCausalLM": Family(
        turns_neighbours=True,
        read=b.read_use_bias,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "IQuestCoderForCausalLM": Family(
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "GraniteMoeSharedForCausalLM": Family(
        page="hybrid",
        block=BlockConfig(is_gated=True),
        naming="granite_hybrid",
        scales="granite",
        experts="mixtral",
        fused_gate_up=True,
        read=r.read_granite_shared,
        defaults=_GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "GraniteMoeForCausalLM": Family(
        scales="granite",
        naming="granitemoe",
        experts="mixtral",
        defaults=_GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            windows="all",
            defaults={
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "use_sliding_window": True,
            },
        ),
        "MinistralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            windows="upper",
            defaults={
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 0,  # all, where no list says otherwise
            },
        ),
        "CwmForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            windows="pattern",
            read=b.read_cwm,
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rope_theta": 1e6,
                "sliding_window": 8192,
                "use_sliding_window": True,
            },
        ),
        "HeliumForCausalLM": Family(
            turns_neighbours=True,
            output_bias=False,
            defaults={
                "rms_norm_eps": 1e-8,
                "max_position_embeddings": 4096,
                "head_dim": 128,
                "rope_theta": 1e5,
            },
        ),
        "Qwen2ForCausalLM": _QWEN2,
        "Qwen2VLForConditionalGeneration": _QWEN2_VL,
        "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
        "Qwen3ForCausalLM": Family(
            qk_norm=True, windows="upper", defaults=_QWEN | {"head_dim": 128}
        ),
        "MixtralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            windows="all",
            experts="mixtral",
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "rope_theta": 1e6,
                "use_sliding_window": True,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
        ),
        "Qwen2MoeForCausalLM": Family(
            qkv_bias=True,
            output_bias=False,
            windows="upper",
            experts="qwen-shared",
            defaults=_QWEN
            | {
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
            },
        ),
        "Qwen3MoeForCausalLM": Family(
            qk_norm=True,
            windows="upper",
            experts="qwen",
            # The whole model's or none: config.json lists no layers that differ.
            defaults=_QWEN
            | {
                "max_window_layers": 0,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
            },
        ),
        "GptOssForCausalLM": Family(
            naming="gpt_oss",
            windows="pattern",
            experts="gpt-oss",
            has_sinks=True,
            read=b.read_gpt_oss,
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "head_dim": 64,
                "num_key_value_heads": 8,
                "attention_bias": True,
                "rope_theta": 150000.0,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
                "use_sliding_window": True,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
            },
        ),
        "SmolLM3ForCausalLM": Family(
            windows="nope",
            nope=True,
            defaults={
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "rope_theta": 2e6,
                "no_rope_layer_interval": 4,
                "tie_word_embeddings": True,
            },
        ),
        "Phi3ForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            fused_qkv=True,
            fused_gate_up=True,
            windows="all",
            yarn_is_longrope=True,
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "use_sliding_window": True,
            },
        ),
        "GraniteForCausalLM": Family(scales="granite", defaults=_GRANITE),
        "Gemma2ForCausalLM": Family(
            page="gemma", scales="gemma", windows="pattern", defaults=_GEMMA2
        ),
        "LlavaForConditionalGeneration": _LLAVA_TEXT,
        "LlavaNextForConditionalGeneration": _LLAVA_TEXT,
        "LlavaOnevisionForConditionalGeneration": _INTERNVL_TEXT,
        "Qwen3VLForConditionalGeneration": _QWEN3_VL,
        "Mistral3ForConditionalGeneration": _MISTRAL3_TEXT,
        "InternVLForConditionalGeneration": _INTERNVL_TEXT,
        "Qwen2AudioForConditionalGeneration": _QWEN2_AUDIO_TEXT,
        "Idefics3ForConditionalGeneration": _SMOLVLM_TEXT,
        "SmolVLMForConditionalGeneration": _SMOLVLM_TEXT,
        "Gemma3ForCausalLM": _GEMMA3_FAMILY,
        "Gemma3ForConditionalGeneration": _GEMMA3_FAMILY,  # its text part
        "DeepseekV2ForCausalLM": _deepseek(),
        "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
        "Glm4MoeLiteForCausalLM": _deepseek(
            topk_method="noaux_tc",
            norm_topk_prob=True,
            routed_scaling_factor=1.8,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
        "YoutuForCausalLM": replace(
            _deepseek(
                q_lora_rank=1536,
                max_position_embeddings=131072,
                rope_theta=1e6,
                tie_word_embeddings=True,
            ),
            experts="none",
        ),
        "Dots1ForCausalLM": Family(
            qk_norm=True,
            windows="upper",
            experts="grouped",
            defaults=_SIGMOID_EXPERTS
            | {
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 2048,
                "use_sliding_window": True,
                "sliding_window": 4096,
                "max_window_layers": 62,
                "norm_topk_prob": False,
            },
        ),
        "SolarOpenForCausalLM": Family(
            output_bias=False,
            experts="grouped",
            aliases={"intermediate_size": "moe_intermediate_size"},  # no layer is without experts
            defaults=_SIGMOID_EXPERTS
            | {
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rope_theta": 1e6,
            },
        ),
        "Glm4MoeForCausalLM": Family(
            experts="grouped",
            qkv_bias=None,
            output_bias=False,
            read=read_glm_moe,
            defaults=_GLM
            | _SIGMOID_EXPERTS
            | {
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                "attention_bias": False,
                "first_k_dense_replace": 1,
            },
        ),
        "WhisperForConditionalGeneration": _WHISPER,
        **_GPT,
        **_LIKE_LLAMA,
    }
)
