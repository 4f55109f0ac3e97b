"""Vision towers (CLIP, SigLIP, InternViT, Qwen-VL's, Pixtral's), and the projectors that make rows
for a language model of theirs.

x ── norm ── qkv ── attention ── o ──(+)── norm ── fc1 ── activation ── fc2 ──(+)── x
 └───────────────────────────────────┘ └──────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.rope import axial_rope
from octavo_engine.ops import AttentionSpec, layer_output

if TYPE_CHECKING:
    from octavo_engine.models.vision_config import MediaConfig, TowerActivation, VisionConfig
    from octavo_engine.ops import Loader, Rope, Value, VisionOps

QUICK_GELU = 1.702  # x * sigmoid(that * x)
QK_NORM_EPS = 1e-6


class TowerNorm:
    """A layer norm with weight and bias, or an RMS norm."""

    def __init__(
        self, config: VisionConfig, loader: Loader, name: str, eps: float | None = None
    ) -> None:
        self.weight = loader.vector(f"{name}.weight", config.hidden_size)
        self.bias = None
        if not config.has_rms_norms:
            self.bias = loader.vector(f"{name}.bias", config.hidden_size)
        self.eps = config.norm_eps if eps is None else eps

    def forward(self, ops: VisionOps, x: Value) -> Value:
        if self.bias is None:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class VisionTower:
    """Rows of pixels, one for each patch, to hidden states. The token before the patches, if there
    is one, has pixels of zero; what it is stands in its position."""

    def __init__(self, config: VisionConfig, loader: Loader) -> None:
        self.config = config
        self.patches = loader.linear(
            "vision.patches", config.patch_columns, config.hidden_size, bias=config.patch_bias
        )
        self.positions = self.rope = None
        if config.rope_theta is None:
            self.positions = loader.embedding(
                "vision.positions", config.num_tokens, config.hidden_size
            )
        else:
            self.rope = axial_rope(
                config.rope_theta, config.head_dim, alternates=config.rope_alternates
            )
        self.stretched = (
            None  # positions of a square, which a step brings as its picture needs them
        )
        if config.positions_side:
            self.stretched = loader.vector(
                "vision.stretched", config.positions_side**2 * config.hidden_size
            )
        self.pre_norm = (
            TowerNorm(config, loader, "vision.pre_norm") if config.has_pre_norm else None
        )
        self.layers = [
            VisionLayer(config, loader, index, self.rope) for index in range(config.num_layers)
        ]
        self.post_norm = None
        if config.has_post_norm:
            self.post_norm = TowerNorm(config, loader, "vision.post_norm", config.post_norm_eps)

    def forward(self, ops: VisionOps) -> Value:
        x = ops.linear(ops.input(self.config.patch_columns), self.patches)
        if self.positions is not None:
            x = ops.add(x, ops.table(self.positions, "positions"))
        if self.stretched is not None:
            x = ops.add(x, ops.input(self.config.hidden_size, first=self.config.patch_columns))
        if self.pre_norm is not None:
            x = self.pre_norm.forward(ops, x)
        for index, layer in enumerate(self.layers):
            x = layer.forward(ops, x)
            if index in self.config.deep_layers:
                x = ops.keep(layer_output(index), x)
        return x if self.post_norm is None else self.post_norm.forward(ops, x)


class VisionLayer:
    """Attention over the whole picture or a window of it, then an MLP, each normed before."""

    def __init__(self, config: VisionConfig, loader: Loader, index: int, rope: Rope | None) -> None:
        prefix, size = f"vision.layers.{index}", config.hidden_size
        self.attention_norm = TowerNorm(config, loader, f"{prefix}.layer_norm1")
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        inner = config.num_heads * config.head_columns
        self.qkv = loader.linear(names, size, [inner, inner, inner], bias=config.qkv_bias)
        q_norm = k_norm = None
        if config.has_qk_norms:
            q_norm, k_norm = (
                loader.vector(f"{prefix}.self_attn.{name}_norm.weight", inner) for name in "qk"
            )
        bias = config.linear_bias
        self.output = loader.linear(f"{prefix}.self_attn.out_proj", inner, size, bias=bias)
        self.mlp_norm = TowerNorm(config, loader, f"{prefix}.layer_norm2")
        wide, self.is_gated = config.intermediate_size, config.is_gated
        if config.is_gated:
            names = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]
            self.up = loader.linear(names, size, [wide, wide], bias=bias)
            self.down = loader.linear(f"{prefix}.mlp.down_proj", wide, size, bias=bias)
        else:
            self.up = loader.linear(f"{prefix}.mlp.fc1", size, wide, bias=bias)
            self.down = loader.linear(f"{prefix}.mlp.fc2", wide, size, bias=bias)
        self.activation = config.activation
        self.spec = AttentionSpec(
            layer=0,  # what is not kept can share its place
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_columns,
            scale=config.head_dim**-0.5,
            rope=rope,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=QK_NORM_EPS,
            norm="row" if config.has_qk_norms else "rms",
            is_causal=False,
            is_segmented=bool(config.window) and index not in config.whole_layers,
        )

    def forward(self, ops: VisionOps, x: Value) -> Value:
        h = ops.linear(self.attention_norm.forward(ops, x), self.qkv)
        x = ops.add(x, ops.linear(ops.encoder_attention(h, self.spec), self.output))
        h = ops.linear(self.mlp_norm.forward(ops, x), self.up)
        if self.is_gated and self.activation != "quick_gelu":
            return ops.add(x, ops.linear(ops.glu(h, self.activation), self.down))
        return ops.add(x, ops.linear(_activated(ops, h, self.activation), self.down))


class MediaProjector:
    """Hidden states of a tower, brought together as the family does, to rows of the language
    model's input, or those of a layer inside to what it reads besides."""

    def __init__(self, config: MediaConfig, loader: Loader, deep: int | None = None) -> None:
        """`deep`: which of the layers inside."""
        name = "projector" if deep is None else f"deep.{deep}"
        norm = config.projector_norm if deep is None else "layer"
        self.columns = config.projector_columns
        size, bias = config.text_size, config.projector_bias
        self.norm = self.norm_bias = None
        self.norm_eps = config.projector_norm_eps
        if norm == "rms":
            self.norm = loader.vector(f"{name}.norm.weight", self.columns, offset=1.0)
        elif norm == "layer":
            self.norm = loader.vector(f"{name}.norm.weight", self.columns)
            self.norm_bias = loader.vector(f"{name}.norm.bias", self.columns)
        self.activation = config.projector_activation
        inner = self.columns if config.family == "qwen2_vl" else size
        self.merge, merged = None, self.columns
        if config.merges:
            merged = config.vision.hidden_size
            self.merge = loader.linear(f"{name}.merge", self.columns, merged, bias=False)
        self.first = loader.linear(f"{name}.linear_1", merged, inner, bias=bias)
        self.newline = None  # the row behind each line of tiles that are put together
        if config.grids:
            self.newline = loader.vector("projector.newline", size)
        self.second = None
        if config.family not in ("idefics3", "gemma3", "qwen2_audio"):
            self.second = loader.linear(f"{name}.linear_2", inner, size, bias=bias)

    def forward(self, ops: VisionOps) -> Value:
        x = ops.input(self.columns)
        if self.norm_bias is not None:
            x = ops.layer_norm(x, self.norm, self.norm_bias, self.norm_eps)
        elif self.norm is not None:
            x = ops.rms_norm(x, self.norm, self.norm_eps)
        if self.merge is not None:
            x = ops.linear(x, self.merge)
        x = ops.linear(x, self.first)
        if self.second is None:
            return x
        return ops.linear(ops.activation(x, self.activation), self.second)


def _activated(ops: VisionOps, x: Value, activation: TowerActivation) -> Value:
    if activation != "quick_gelu":
        return ops.activation(x, activation)
    return ops.scale(ops.activation(ops.scale(x, QUICK_GELU), "silu"), 1.0 / QUICK_GELU)
