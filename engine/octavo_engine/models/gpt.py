"""GPT and its kin: layer norms or RMS norms, learned positions, linear biases or rope, plain
or gated MLPs, after attention or beside it. They differ in ModelConfig.block only.

x ── norm ── attention ──(+)── norm ── mlp ──(+)── x          sequential
 └────────────────────────┘ └─────────────────┘
x ── norm ─┬─ attention ──(+)──(+)── x                        parallel
 │         └─ mlp ──────────────┘
 └─────────────────────────┘
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from octavo_engine.models.layers import (
    Attention,
    Experts,
    Mlp,
    Ropes,
    TextModel,
    run_layers,
    token_embedding,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.models.block import Wiring
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Loader, Ops, Value


class Gpt(TextModel["GptBody"]):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        super().__init__(GptBody(config, loader, max_model_len), config, loader)


class GptBody:
    """All but the head: token ids to hidden states, which are still to be normed."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        ropes = Ropes(max_model_len)
        block = config.block
        self.config = config
        self.embedding = token_embedding(config, loader)
        self.positions = None
        if block.positions == "table":
            rows = config.max_position_embeddings + block.position_offset
            self.positions = loader.embedding("model.embed_positions", rows, config.hidden_size)
        self.embedding_norm = None
        if block.has_embedding_norm:
            self.embedding_norm = BlockNorm(config, loader, "model.embedding_norm")
        self.layers = [GptLayer(config, loader, index, ropes) for index in range(config.num_layers)]
        self.norm = BlockNorm(config, loader, "model.norm")

    def forward(self, ops: Ops) -> Value:
        x = ops.embedding(self.embedding, scale=self.config.embedding_scale)
        if self.positions is not None:
            offset = self.config.block.position_offset
            x = ops.add(x, ops.table(self.positions, "positions", offset=offset))
        if self.embedding_norm is not None:
            x = self.embedding_norm.forward(ops, x)
        return run_layers(ops, self.layers, x)

    def normed(self, ops: Ops, x: Value) -> Value:
        return self.norm.forward(ops, x)


class GptLayer:
    """Attention and an MLP, normed and added as the block says."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        prefix = f"model.layers.{index}"
        wiring = config.block.wiring
        names = _NORMS[wiring]
        self.is_parallel = wiring.startswith("parallel")
        self.scale = config.residual_scale
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else BlockNorm(config, loader, f"{prefix}.{name}")
            for name in names
        )
        self.attention = Attention(config, loader, index, ropes)
        self.mlp: Module
        if config.layers[index].has_experts:
            self.mlp = Experts(config, loader, index)
        elif config.block.is_gated:
            self.mlp = Mlp(config, loader, index)
        else:
            self.mlp = PlainMlp(config, loader, index)

    def forward(self, ops: Ops, x: Value) -> Value:
        h = _normed(ops, x, self.before_attention)
        if self.is_parallel:
            beside = h if self.before_mlp is None else self.before_mlp.forward(ops, x)
            x = ops.add(x, self.attention.forward(ops, h), scale=self.scale)
            return ops.add(x, self.mlp.forward(ops, beside), scale=self.scale)
        h = _normed(ops, self.attention.forward(ops, h), self.after_attention)
        x = ops.add(x, h, scale=self.scale)
        h = self.mlp.forward(ops, _normed(ops, x, self.before_mlp))
        return ops.add(x, _normed(ops, h, self.after_mlp), scale=self.scale)


# Before attention, after it, before the MLP, after it.
_NORMS: Mapping[Wiring, tuple[str | None, str | None, str | None, str | None]] = MappingProxyType(
    {
        "sequential": ("input_layernorm", None, "post_attention_layernorm", None),
        "parallel": ("input_layernorm", None, None, None),
        "parallel_two_norms": ("input_layernorm", None, "post_attention_layernorm", None),
        "norm_after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        "norm_around": (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    }
)


class Module(Protocol):
    """What stands in a layer's second half."""

    def forward(self, ops: Ops, x: Value) -> Value: ...


class PlainMlp:
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        prefix = f"model.layers.{index}.mlp"
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up = loader.linear(f"{prefix}.up_proj", size, width, bias=bias)
        self.down = loader.linear(f"{prefix}.down_proj", width, size, bias=bias)
        self.activation = config.activation

    def forward(self, ops: Ops, x: Value) -> Value:
        return ops.linear(ops.activation(ops.linear(x, self.up), self.activation), self.down)


class BlockNorm:
    """A layer norm or an RMS norm with its weights."""

    def __init__(self, config: ModelConfig, loader: Loader, name: str) -> None:
        block, size = config.block, config.hidden_size
        self.is_rms = block.norm == "rms"
        self.eps = config.norm_eps
        self.weight = self.bias = None
        if block.norm_weight:
            self.weight = loader.vector(f"{name}.weight", size, offset=block.norm_offset)
        if block.norm_bias and not self.is_rms:
            self.bias = loader.vector(f"{name}.bias", size)

    def forward(self, ops: Ops, x: Value) -> Value:
        if self.is_rms:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


def _normed(ops: Ops, x: Value, norm: BlockNorm | None) -> Value:
    return x if norm is None else norm.forward(ops, x)
