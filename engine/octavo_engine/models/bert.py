"""BERT and its kin (RoBERTa, DistilBERT, Nomic), which differ in EncoderConfig only.

x ── qkv ── attention ── o ──(+)── norm ── up ── activation ── down ──(+)── norm ── x
 └───────────────────────────┘         └──────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.layers import Ropes
from octavo_engine.ops import AttentionSpec

if TYPE_CHECKING:
    from octavo_engine.models.encoder_config import EncoderConfig
    from octavo_engine.ops import EncoderOps, Loader, Value


class Norm:
    """A layer norm with its weights."""

    def __init__(self, config: EncoderConfig, loader: Loader, name: str) -> None:
        self.weight = loader.vector(f"{name}.weight", config.hidden_size)
        self.bias = loader.vector(f"{name}.bias", config.hidden_size) if config.norm_bias else None
        self.eps = config.norm_eps

    def forward(self, ops: EncoderOps, x: Value) -> Value:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class Bert:
    """Token ids, positions and types to hidden states."""

    def __init__(self, config: EncoderConfig, loader: Loader, max_model_len: int) -> None:
        ropes = Ropes(max_model_len)
        self.config = config
        self.words = loader.embedding(
            "embeddings.word_embeddings", config.vocab_size, config.hidden_size
        )
        self.types = self.positions = None
        if config.num_types:
            self.types = loader.embedding(
                "embeddings.token_type_embeddings", config.num_types, config.hidden_size
            )
        if config.has_positions:
            rows = config.max_position_embeddings + config.position_offset
            self.positions = loader.embedding(
                "embeddings.position_embeddings", rows, config.hidden_size
            )
        self.norm = Norm(config, loader, "embeddings.LayerNorm")
        self.layers = [
            BertLayer(config, loader, index, ropes) for index in range(config.num_layers)
        ]

    def forward(self, ops: EncoderOps) -> Value:
        x = ops.embedding(self.words)
        if self.types is not None:
            x = ops.add(x, ops.table(self.types, "types"))
        if self.positions is not None:
            offset = self.config.position_offset
            x = ops.add(x, ops.table(self.positions, "positions", offset=offset))
        x = self.norm.forward(ops, x)
        for layer in self.layers:
            x = layer.forward(ops, x)
        return x


class BertLayer:
    """Attention, then an MLP, each added to the residual and normed after."""

    def __init__(self, config: EncoderConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        prefix = f"encoder.layer.{index}"
        size = config.hidden_size
        self.qkv = loader.linear(
            [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")],
            size,
            [size, size, size],
            bias=config.attention_bias,
        )
        self.spec = encoder_spec(config, index, ropes)
        self.output = loader.linear(
            f"{prefix}.attention.output.dense", size, size, bias=config.attention_bias
        )
        self.attention_norm = Norm(config, loader, f"{prefix}.attention.output.LayerNorm")
        names = ["intermediate.gate", "intermediate.dense"] if config.is_gated else [
            "intermediate.dense"
        ]  # fmt: skip
        self.up = loader.linear(
            [f"{prefix}.{name}" for name in names],
            size,
            [config.intermediate_size] * len(names),
            bias=config.mlp_bias,
        )
        down_bias = config.mlp_bias if config.down_bias is None else config.down_bias
        self.down = loader.linear(
            f"{prefix}.output.dense", config.intermediate_size, size, bias=down_bias
        )
        self.mlp_norm = Norm(config, loader, f"{prefix}.output.LayerNorm")
        self.activation = config.activation
        self.is_gated = config.is_gated

    def forward(self, ops: EncoderOps, x: Value) -> Value:
        h = ops.encoder_attention(ops.linear(x, self.qkv), self.spec)
        x = self.attention_norm.forward(ops, ops.add(x, ops.linear(h, self.output)))
        h = ops.linear(x, self.up)
        h = ops.glu(h, self.activation) if self.is_gated else ops.activation(h, self.activation)
        return self.mlp_norm.forward(ops, ops.add(x, ops.linear(h, self.down)))


def encoder_spec(config: EncoderConfig, index: int, ropes: Ropes) -> AttentionSpec:
    layer = config.layers[index]
    return AttentionSpec(
        layer=index,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        rope=ropes.get(layer.rope),
        window=layer.window,
        is_causal=False,
    )
