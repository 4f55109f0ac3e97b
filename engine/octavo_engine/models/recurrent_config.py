"""The layers of a model that are not attention, as families' config.json say them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from octavo_engine.caches import StateSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.block import BlockConfig
    from octavo_engine.models.fields import ConfigFields

# What stands in a layer's first half; an MLP mixes nothing.
Mixer = Literal["attention", "conv", "mamba", "mamba2", "attention+mamba2", "delta", "mlp"]

# Where the norm of a scan's results stands.
ScanNorm = Literal["behind_gate", "before_gate", "none"]

MAX_KERNEL = 16  # the extension's own bounds
MAX_SIZE = 1 << 20
MAX_KEY_DIM = 512


class ConvConfig(NamedTuple):
    """A short convolution between two gates, as wide as the model."""

    kernel: int
    bias: bool

    def state(self, hidden_size: int) -> StateSpec:
        return StateSpec((self.kernel - 1, hidden_size))


class MambaConfig(NamedTuple):
    """Mamba 2: a convolution, a scan, and a norm by groups of what a gate lets through."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    conv_bias: bool
    bias: bool  # of the projections
    dt_min: float
    dt_max: float
    norm: ScanNorm = "behind_gate"

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.width + 2 * self.num_groups * self.state_size

    def state(self, hidden_size: int) -> StateSpec:
        scan = (self.num_heads, self.state_size, self.head_dim)
        return StateSpec((self.kernel - 1, self.conv_width), scan)


class SelectiveConfig(NamedTuple):
    """Mamba 1: a convolution, and a scan in which each column has a state of its own."""

    width: int
    state_size: int
    kernel: int
    dt_rank: int
    conv_bias: bool
    bias: bool  # of the projections
    has_norms: bool = True  # of dt, B and C
    norm_eps: float | None = None  # theirs; None: as of all norms

    def state(self, hidden_size: int) -> StateSpec:
        return StateSpec((self.kernel - 1, self.width), (1, self.state_size, self.width))


class DeltaConfig(NamedTuple):
    """A gated delta net: a convolution, a delta rule, and a gated norm of each head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.width

    def state(self, hidden_size: int) -> StateSpec:
        scan = (self.num_value_heads, self.key_dim, self.value_dim)
        return StateSpec((self.kernel - 1, self.conv_width), scan)


class Multipliers(NamedTuple):
    """Of what goes into the parts of a Falcon-H1 layer, and of what comes out of them."""

    attention_in: float
    attention_out: float
    ssm_in: float
    ssm_out: float
    ssm: tuple[float, ...]  # of the projection's columns: gate, x, B, C, dt
    mlp_gate: float
    mlp_down: float


class SharedBlocks(NamedTuple):
    """Transformer blocks that layers use in turn."""

    num_blocks: int
    rank: int  # of what each use adds to the projections
    adapts_attention: bool  # besides the MLP


RecurrentConfig: TypeAlias = ConvConfig | MambaConfig | SelectiveConfig | DeltaConfig


def read_lfm2(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    if fields.raw("layer_types") is None and fields.raw("full_attn_idxs") is not None:
        attended = fields.integers("full_attn_idxs", maximum=1024)
        mixers: list[Mixer] = ["attention" if i in attended else "conv" for i in range(num_layers)]
    else:
        mixers = _mixers(fields, num_layers, {"full_attention": "attention", "conv": "conv"})
    width = fields.integer("intermediate_size", maximum=MAX_SIZE)
    if fields.boolean("block_auto_adjust_ff_dim"):
        multiple = fields.integer("block_multiple_of", maximum=MAX_SIZE)
        width = int(2 * width / 3)
        factor = fields.optional_positive("block_ffn_dim_multiplier")
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
    kernel = fields.integer("conv_L_cache", minimum=2, maximum=MAX_KERNEL)
    return {
        "intermediate_size": width,
        "mixers": mixers,
        "recurrent": ConvConfig(kernel, fields.boolean("conv_bias")),
    }


def read_lfm2_moe(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    if not fields.boolean("use_expert_bias"):
        raise fields.error("use_expert_bias", "must be true")
    return read_lfm2(fields, block)


def _mixers(fields: ConfigFields, num_layers: int, known: Mapping[str, Mixer]) -> list[Mixer]:
    """Of each layer, by the names in `layer_types`; without them all are attention."""
    given = fields.per_layer("layer_types", num_layers)
    if given is None:
        return ["attention"] * num_layers
    if any(entry not in known for entry in given):
        raise fields.error("layer_types", f"must hold {' and '.join(known)} only")
    return [known[entry] for entry in given]


def read_mamba2(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    width = fields.integer("expand", maximum=64) * fields.integer("hidden_size", maximum=MAX_SIZE)
    mamba = _mamba(
        fields,
        heads="num_heads",
        head_dim="head_dim",
        groups="n_groups",
        state="state_size",
        kernel="conv_kernel",
        conv_bias="use_conv_bias",
        bias="use_bias",
        limits=_limits(fields),
    )
    if width != mamba.width:
        raise fields.error("num_heads", f"times head_dim must be {width}, expand * hidden_size")
    return {"mixers": ["mamba2"] * num_layers, "has_mlp": False, "recurrent": mamba}


def read_granite_hybrid(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    known: dict[str, Mixer] = {
        "mamba": "mamba2",
        "linear_attention": "mamba2",
        "attention": "attention",
        "full_attention": "attention",
    }
    has_rope = fields.optional_text("position_embedding_type") == "rope"
    return {
        "intermediate_size": fields.integer("shared_intermediate_size", maximum=MAX_SIZE),
        "mixers": _mixers(fields, num_layers, known),
        "recurrent": _beside_attention(fields),
        "block": replace(block, positions="rope" if has_rope else "none"),
    }


def read_granite_shared(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    """A hybrid of attention only, for the sake of the MLP beside its experts."""
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    return {
        "intermediate_size": fields.integer("shared_intermediate_size", maximum=MAX_SIZE),
        "mixers": ["attention"] * num_layers,
    }


def read_bamba(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    attended = fields.integers("attn_layer_indices", maximum=1024)
    mixers: list[Mixer] = [
        "attention" if index in attended else "mamba2" for index in range(num_layers)
    ]
    return {"mixers": mixers, "recurrent": _beside_attention(fields)}


def read_jamba(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    mixers: list[Mixer] = [
        "attention" if is_attention else "mamba"
        for is_attention in layers_at(fields, "attn_layer", num_layers)
    ]
    hidden = fields.integer("hidden_size", maximum=MAX_SIZE)
    return {
        "mixers": mixers,
        "recurrent": SelectiveConfig(
            fields.integer("mamba_expand", maximum=64) * hidden,
            fields.integer("mamba_d_state", maximum=MAX_SIZE),
            fields.integer("mamba_d_conv", minimum=2, maximum=MAX_KERNEL),
            _dt_rank(fields, "mamba_dt_rank", hidden),
            fields.boolean("mamba_conv_bias"),
            fields.boolean("mamba_proj_bias"),
        ),
    }


def read_mamba(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    hidden = fields.integer("hidden_size", maximum=MAX_SIZE)
    mamba = SelectiveConfig(
        fields.integer("expand", maximum=64) * hidden,
        fields.integer("state_size", maximum=MAX_SIZE),
        fields.integer("conv_kernel", minimum=2, maximum=MAX_KERNEL),
        _dt_rank(fields, "time_step_rank", hidden),
        fields.boolean("use_conv_bias"),
        fields.boolean("use_bias"),
        has_norms=False,
    )
    return {"mixers": ["mamba"] * num_layers, "has_mlp": False, "recurrent": mamba}


def read_falcon_mamba(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    """Mamba 1 with norms, by no weights, of dt, B and C."""
    read = dict(read_mamba(fields, block))
    eps = fields.positive("mixer_rms_eps")
    return read | {"recurrent": read["recurrent"]._replace(has_norms=True, norm_eps=eps)}


def _dt_rank(fields: ConfigFields, name: str, hidden: int) -> int:
    if fields.raw(name) == "auto":
        return -(-hidden // 16)
    return fields.integer(name, maximum=MAX_SIZE)


def layers_at(fields: ConfigFields, name: str, num_layers: int) -> list[bool]:
    """Which are at `name`_offset in each `name`_period layers."""
    period = fields.integer(f"{name}_period", maximum=1024)
    offset = fields.integer(f"{name}_offset", minimum=0, maximum=period - 1)
    return [index % period == offset for index in range(num_layers)]


def read_falcon_h1(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    mixers: list[Mixer] = ["attention+mamba2"] * num_layers
    mamba = _beside_attention(fields)
    if fields.boolean("mamba_rms_norm"):
        is_first = fields.boolean("mamba_norm_before_gate")
        mamba = mamba._replace(norm="before_gate" if is_first else "behind_gate")
    else:
        mamba = mamba._replace(norm="none")
    bias = fields.boolean("projectors_bias")
    if bias != mamba.bias:
        raise fields.error("projectors_bias", "must be as mamba_proj_bias")
    return {
        "mixers": mixers,
        "recurrent": mamba,
        "multipliers": Multipliers(
            fields.positive("attention_in_multiplier"),
            fields.positive("attention_out_multiplier"),
            fields.positive("ssm_in_multiplier"),
            fields.positive("ssm_out_multiplier"),
            _multipliers(fields, "ssm_multipliers", 5),
            *_multipliers(fields, "mlp_multipliers", 2),
        ),
    }


def _multipliers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if fields.raw(name) is None else fields.positives(name, count)


def _beside_attention(fields: ConfigFields) -> MambaConfig:
    """By the names of fields that Granite 4, Bamba and Falcon-H1 share."""
    width = fields.optional_integer("mamba_d_ssm", maximum=MAX_SIZE)
    if width is None:
        expand = fields.integer("mamba_expand", maximum=64)
        width = expand * fields.integer("hidden_size", maximum=MAX_SIZE)
    head_dim = fields.raw("mamba_d_head")
    mamba = _mamba(
        fields,
        heads="mamba_n_heads",
        head_dim="mamba_d_head",
        groups="mamba_n_groups",
        state="mamba_d_state",
        kernel="mamba_d_conv",
        conv_bias="mamba_conv_bias",
        bias="mamba_proj_bias",
        limits=_limits(fields),
        own_width=width if head_dim in (None, "auto") else None,
    )
    if mamba.width != width:
        raise fields.error("mamba_n_heads", f"times the size of a head must be {width}")
    return mamba


def read_zamba2(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    names = fields.per_layer("layers_block_type", num_layers)
    known: dict[str, Mixer] = {
        "mamba": "mamba2",
        "linear_attention": "mamba2",
        "hybrid": "attention+mamba2",
    }
    if names is None or any(name not in known for name in names) or "hybrid" not in names:
        raise fields.error(
            "layers_block_type", f"must hold {', '.join(known)} only, and hybrid at least once"
        )
    if fields.boolean("use_long_context"):
        raise fields.error("use_long_context", "must be false")
    if fields.positive("rms_norm_eps") != 1e-5:
        raise fields.error("rms_norm_eps", "must be 1e-5, as in the norm behind a scan")
    hidden = fields.integer("hidden_size", maximum=MAX_SIZE)
    heads = fields.integer("num_attention_heads", maximum=MAX_SIZE)
    head_dim = fields.integer("head_dim", maximum=1024)
    if head_dim * heads != 2 * hidden:
        raise fields.error("attention_head_dim", f"times {heads} heads must be {2 * hidden}")
    adapts_attention = fields.boolean("use_shared_attention_adapter")
    if adapts_attention and fields.raw("num_key_value_heads") not in (None, heads):
        raise fields.error("num_key_value_heads", f"must be {heads}, as the heads of queries")
    mamba = _mamba(
        fields,
        heads="n_mamba_heads",
        head_dim="",
        groups="mamba_ngroups",
        state="mamba_d_state",
        kernel="mamba_d_conv",
        conv_bias=None,
        bias="mlp_bias",
        limits=(fields.positive("time_step_min"), math.inf),
        own_width=fields.integer("mamba_expand", maximum=64) * hidden,
    )
    if mamba.width % hidden:
        raise fields.error("n_mamba_heads", f"must divide {mamba.width} columns")
    return {
        "attention_scale": (head_dim / 2) ** -0.5,
        "mixers": [known[name] for name in names],
        "recurrent": mamba,
        "shared_blocks": SharedBlocks(
            min(fields.integer("num_mem_blocks", maximum=1024), names.count("hybrid")),
            fields.integer("adapter_rank", maximum=MAX_SIZE),
            adapts_attention,
        ),
        "block": replace(block, positions="rope" if fields.boolean("use_mem_rope") else "none"),
    }


_PATTERN: dict[str, Mixer] = {"M": "mamba2", "*": "attention", "-": "mlp"}


def read_nemotron_h(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    pattern = fields.optional_text("hybrid_override_pattern")
    if pattern is not None:
        if not pattern or any(letter not in _PATTERN for letter in pattern):
            raise fields.error("hybrid_override_pattern", "must consist of M, * and -: no experts")
        mixers = [_PATTERN[letter] for letter in pattern]
    else:
        names = fields.raw("layers_block_type")
        known: dict[str, Mixer] = {
            "linear_attention": "mamba2",
            "mamba": "mamba2",
            "full_attention": "attention",
            "attention": "attention",
            "mlp": "mlp",
        }
        if not isinstance(names, list) or any(name not in known for name in names):
            raise fields.error(
                "layers_block_type", f"must hold {', '.join(known)} only: no experts"
            )
        mixers = [known[name] for name in names]
    mamba = _mamba(
        fields,
        heads="mamba_num_heads",
        head_dim="mamba_head_dim",
        groups="n_groups",
        state="ssm_state_size",
        kernel="conv_kernel",
        conv_bias="use_conv_bias",
        bias="mamba_proj_bias",
        limits=(fields.positive("time_step_min"), math.inf),
    )
    return {"mixers": mixers, "has_mlp": False, "recurrent": mamba}


def read_qwen3_next(fields: ConfigFields, block: BlockConfig) -> Mapping[str, Any]:
    num_layers = fields.integer("num_hidden_layers", maximum=1024)
    if fields.raw("layer_types") is None:
        every = fields.integer("full_attention_interval", maximum=1024)
        mixers: list[Mixer] = [
            "delta" if (index + 1) % every else "attention" for index in range(num_layers)
        ]
    else:
        known: dict[str, Mixer] = {"linear_attention": "delta", "full_attention": "attention"}
        mixers = _mixers(fields, num_layers, known)
    key_heads = fields.integer("linear_num_key_heads", maximum=MAX_SIZE)
    value_heads = fields.integer("linear_num_value_heads", maximum=MAX_SIZE)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"must be a multiple of {key_heads} key heads")
    delta = DeltaConfig(
        key_heads,
        value_heads,
        fields.integer("linear_key_head_dim", maximum=MAX_KEY_DIM),
        fields.integer("linear_value_head_dim", maximum=MAX_SIZE),
        fields.integer("linear_conv_kernel_dim", minimum=2, maximum=MAX_KERNEL),
    )
    return {"mixers": mixers, "recurrent": delta}


def _mamba(
    fields: ConfigFields,
    *,
    heads: str,
    head_dim: str,
    groups: str,
    state: str,
    kernel: str,
    conv_bias: str | None,
    bias: str,
    limits: tuple[float, float],
    own_width: int | None = None,
) -> MambaConfig:
    """By the family's names of the fields; a `conv_bias` of None is always there. With `own_width`
    the head's width follows from it."""
    num_heads = fields.integer(heads, maximum=MAX_SIZE)
    num_groups = fields.integer(groups, maximum=MAX_SIZE)
    if num_heads % num_groups:
        raise fields.error(groups, f"must divide {num_heads} heads")
    if own_width is None:
        dim = fields.integer(head_dim, maximum=MAX_SIZE)
    else:
        dim = own_width // num_heads
    return MambaConfig(
        num_heads,
        dim,
        num_groups,
        fields.integer(state, maximum=MAX_SIZE),
        fields.integer(kernel, minimum=2, maximum=MAX_KERNEL),
        conv_bias is None or fields.boolean(conv_bias),
        fields.boolean(bias),
        *limits,
    )


def _limits(fields: ConfigFields) -> tuple[float, float]:
    """Between which the steps of a scan's time lie; JSON has no infinity, so files spell it."""
    value = fields.raw("time_step_limit")
    if value is None:
        return 0.0, math.inf
    if isinstance(value, list) and len(value) == 2:
        ends = [
            math.inf if end in ("Infinity", {"__float__": "Infinity"}) else end for end in value
        ]
        if all(isinstance(end, (int, float)) for end in ends) and 0 <= ends[0] <= ends[1]:
            return float(ends[0]), float(ends[1])
    raise fields.error("time_step_limit", "must be a list of two numbers from 0 on, in order")
