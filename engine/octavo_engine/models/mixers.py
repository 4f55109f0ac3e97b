"""What mixes a layer's tokens where it is not attention: parts that remember by a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo_engine.models.layers import Attention, Mlp
from octavo_engine.models.recurrent_config import (
    ConvConfig,
    DeltaConfig,
    MambaConfig,
    SelectiveConfig,
)
from octavo_engine.ops import ConvSpec, DeltaSpec, SelectiveSpec, SsdSpec

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.layers import Ropes
    from octavo_engine.ops import Loader, Ops, RecurrentLoader, RecurrentOps, Value, Vector


class GatedConv:
    """out(c * convolution(b * x)), where b, c and x come from one projection."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        conv = config.recurrent
        assert isinstance(conv, ConvConfig), "the layer is such a convolution"
        prefix = f"model.layers.{index}.conv"
        size = self.size = config.hidden_size
        self.input = loader.linear(f"{prefix}.in_proj", size, 3 * size, bias=conv.bias)
        self.output = loader.linear(f"{prefix}.out_proj", size, size, bias=conv.bias)
        self.spec = ConvSpec(
            layer=config.cache_index(index),
            kernel=conv.kernel,
            weight=cast("RecurrentLoader", loader).array(
                f"{prefix}.conv.weight", (size, 1, conv.kernel)
            ),
            bias=loader.vector(f"{prefix}.conv.bias", size) if conv.bias else None,
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        parts = ops.linear(x, self.input)
        b, c, x = (ops.columns(parts, place * self.size, self.size) for place in range(3))
        x = ops.short_conv(ops.multiply(b, x), self.spec)
        return ops.linear(ops.multiply(c, x), self.output)


class Mamba:
    """A projection to [gate | x, B, C | dt], a convolution of the middle, the scan, and a norm of
    what the gate lets through."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        mamba = config.recurrent
        assert isinstance(mamba, MambaConfig), "the layer is one"
        prefix = f"model.layers.{index}.mamba"
        layer, heads = config.cache_index(index, of_state=True), mamba.num_heads
        self.config, self.eps = mamba, config.norm_eps
        # Those of x, B and C are in the convolution's weights.
        multipliers = config.multipliers
        self.gate_scale = 1.0 if multipliers is None else multipliers.ssm[0]
        self.dt_scale = 1.0 if multipliers is None else multipliers.ssm[-1]
        self.input = loader.linear(
            f"{prefix}.in_proj",
            config.hidden_size,
            mamba.width + mamba.conv_width + heads,
            bias=mamba.bias,
        )
        self.output = loader.linear(
            f"{prefix}.out_proj", mamba.width, config.hidden_size, bias=mamba.bias
        )
        self.norm = None
        if mamba.norm != "none":
            self.norm = loader.vector(f"{prefix}.norm.weight", mamba.width)
        self.conv = _conv(
            loader,
            f"{prefix}.conv1d",
            layer,
            columns=mamba.conv_width,
            kernel=mamba.kernel,
            has_bias=mamba.conv_bias,
        )
        self.scan = SsdSpec(
            layer=layer,
            offset=mamba.state(config.hidden_size).scan_offset,
            num_heads=heads,
            head_dim=mamba.head_dim,
            num_groups=mamba.num_groups,
            state_size=mamba.state_size,
            a_log=loader.vector(f"{prefix}.A_log", heads),
            d=loader.vector(f"{prefix}.D", heads),
            dt_bias=loader.vector(f"{prefix}.dt_bias", heads),
            dt_min=mamba.dt_min,
            dt_max=mamba.dt_max,
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        mamba = self.config
        parts = ops.linear(x, self.input)
        gate = scaled(ops, ops.columns(parts, 0, mamba.width), self.gate_scale)
        xbc = ops.columns(parts, mamba.width, mamba.conv_width)
        dt = ops.columns(parts, mamba.width + mamba.conv_width, mamba.num_heads)
        dt = scaled(ops, dt, self.dt_scale)
        y = ops.ssd_scan(ops.short_conv(xbc, self.conv), dt, self.scan)
        if mamba.norm == "before_gate":
            y = ops.group_norm(y, self.norm, self.eps, mamba.width // mamba.num_groups)
        y = ops.multiply(y, gate, "silu")
        if mamba.norm == "behind_gate":
            y = ops.group_norm(y, self.norm, self.eps, mamba.width // mamba.num_groups)
        return ops.linear(y, self.output)


class SelectiveMamba:
    """A projection to [x | gate], a convolution of x, a projection of that to [dt, B, C], which are
    normed or not, and the scan."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        mamba = config.recurrent
        assert isinstance(mamba, SelectiveConfig), "the layer is one"
        prefix = f"model.layers.{index}.mamba"
        width, rank, size = mamba.width, mamba.dt_rank, mamba.state_size
        layer = config.cache_index(index)
        self.config = mamba
        self.eps = config.norm_eps if mamba.norm_eps is None else mamba.norm_eps
        self.input = loader.linear(
            f"{prefix}.in_proj", config.hidden_size, 2 * width, bias=mamba.bias
        )
        self.output = loader.linear(
            f"{prefix}.out_proj", width, config.hidden_size, bias=mamba.bias
        )
        self.steps = loader.linear(f"{prefix}.x_proj", width, rank + 2 * size)
        self.dt = loader.linear(f"{prefix}.dt_proj", rank, width)  # its bias is the scan's
        # Of each its columns of the projection, and its norm.
        self.places: list[tuple[int, int, Vector | None]] = []
        first = 0
        for name, columns in (("dt", rank), ("b", size), ("c", size)):
            norm = None
            if mamba.has_norms:
                norm = loader.vector(f"{prefix}.{name}_layernorm.weight", columns)
            self.places.append((first, columns, norm))
            first += columns
        self.conv = _conv(
            loader,
            f"{prefix}.conv1d",
            layer,
            columns=width,
            kernel=mamba.kernel,
            has_bias=mamba.conv_bias,
        )
        self.scan = SelectiveSpec(
            layer=layer,
            offset=mamba.state(config.hidden_size).scan_offset,
            width=width,
            state_size=size,
            a_log=_array(loader, f"{prefix}.A_log", (width, size)),
            d=loader.vector(f"{prefix}.D", width),
            dt_bias=loader.vector(f"{prefix}.dt_proj.bias", width),
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        width = self.config.width
        parts = ops.linear(x, self.input)
        x = ops.short_conv(ops.columns(parts, 0, width), self.conv)
        steps = ops.linear(x, self.steps)
        dt, b, c = (self._step(ops, steps, *place) for place in self.places)
        y = ops.selective_scan(x, ops.linear(dt, self.dt), b, c, self.scan)
        gate = ops.columns(parts, width, width)
        return ops.linear(ops.multiply(y, gate, "silu"), self.output)

    def _step(
        self, ops: RecurrentOps, steps: Value, first: int, count: int, norm: Vector | None
    ) -> Value:
        part = ops.columns(steps, first, count)
        return part if norm is None else ops.group_norm(part, norm, self.eps, count)


class AttentionBesideMamba:
    """Both of the same normed input, each times its multipliers, added."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        assert config.multipliers is not None, "the family has them"
        self.multipliers = config.multipliers
        self.attention = Attention(config, loader, index, ropes)
        self.mamba = Mamba(config, loader, index)

    def forward(self, ops: Ops, x: Value) -> Value:
        by = self.multipliers
        y = self.mamba.forward(ops, scaled(ops, x, by.ssm_in))
        z = self.attention.forward(ops, scaled(ops, x, by.attention_in))
        return ops.add(scaled(ops, y, by.ssm_out), z, scale=by.attention_out)


class ScaledMlp(Mlp):
    """An MLP with multipliers of what goes into its gate, and of its result."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        super().__init__(config, loader, index)
        assert config.multipliers is not None, "the family has them"
        self.multipliers, self.width = config.multipliers, config.intermediate_size

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        parts = ops.linear(x, self.gate_up)
        gate = scaled(ops, ops.columns(parts, 0, self.width), self.multipliers.mlp_gate)
        y = ops.multiply(ops.columns(parts, self.width, self.width), gate, self.activation)
        return scaled(ops, ops.linear(y, self.down), self.multipliers.mlp_down)


class GatedDelta:
    """A projection to [q, k, v | gate], a convolution of the first three, the delta rule, a norm of
    each head, and the gate."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        delta = config.recurrent
        assert isinstance(delta, DeltaConfig), "the layer is one"
        prefix = f"model.layers.{index}.linear_attn"
        size, layer, heads = config.hidden_size, config.cache_index(index), delta.num_value_heads
        self.config, self.eps = delta, config.norm_eps
        if config.family.naming == "qwen3_5":  # apart, and in the order of our columns
            self.input = loader.linear(
                [f"{prefix}.in_proj_qkv", f"{prefix}.in_proj_z"],
                size,
                [delta.conv_width, delta.width],
            )
            self.gates = loader.linear(
                [f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"], size, [heads, heads]
            )
        else:
            self.input = loader.linear(
                f"{prefix}.in_proj_qkvz", size, delta.conv_width + delta.width
            )
            self.gates = loader.linear(f"{prefix}.in_proj_ba", size, 2 * heads)
        self.output = loader.linear(f"{prefix}.out_proj", delta.width, size)
        self.norm = loader.vector(f"{prefix}.norm.weight", delta.value_dim)
        self.conv = _conv(
            loader, f"{prefix}.conv1d", layer, columns=delta.conv_width, kernel=delta.kernel
        )
        self.rule = DeltaSpec(
            layer=layer,
            offset=delta.state(size).scan_offset,
            num_key_heads=delta.num_key_heads,
            num_value_heads=heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
            a_log=loader.vector(f"{prefix}.A_log", heads),
            dt_bias=loader.vector(f"{prefix}.dt_bias", heads),
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        delta = self.config
        parts = ops.linear(x, self.input)
        qkv = ops.short_conv(ops.columns(parts, 0, delta.conv_width), self.conv)
        y = ops.delta_rule(qkv, ops.linear(x, self.gates), self.rule)
        y = ops.group_norm(y, self.norm, self.eps, delta.value_dim)
        gate = ops.columns(parts, delta.conv_width, delta.width)
        return ops.linear(ops.multiply(y, gate, "silu"), self.output)


class GatedAttention(Attention):
    """Attention whose results pass a gate of as many columns."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        super().__init__(config, loader, index, ropes, norm_offset=config.block.norm_offset)
        self.gate = loader.linear(
            f"model.layers.{index}.self_attn.g_proj",
            config.hidden_size,
            config.num_heads * config.head_dim,
            bias=config.qkv_bias,
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        y = ops.attention(ops.linear(x, self.qkv), self.spec)
        return ops.linear(ops.multiply(y, ops.linear(x, self.gate), "sigmoid"), self.output)


def scaled(ops: Ops, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scale(x, factor)


def _conv(
    loader: Loader, name: str, layer: int, *, columns: int, kernel: int, has_bias: bool = False
) -> ConvSpec:
    """Of a scan's inputs."""
    return ConvSpec(
        layer=layer,
        kernel=kernel,
        weight=_array(loader, f"{name}.weight", (columns, 1, kernel)),
        bias=loader.vector(f"{name}.bias", columns) if has_bias else None,
        activation="silu",
    )


def _array(loader: Loader, name: str, shape: tuple[int, ...]) -> Vector:
    return cast("RecurrentLoader", loader).array(name, shape)
