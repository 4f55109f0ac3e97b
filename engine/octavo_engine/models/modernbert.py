"""ModernBERT: an encoder normed before each block, with a gated MLP and windows in most layers.

x ── norm ── qkv ── attention ── o ──(+)── norm ── up ── glu ── down ──(+)── x
 └───────────────────────────────────┘ └──────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.bert import Norm, encoder_spec
from octavo_engine.models.layers import Ropes

if TYPE_CHECKING:
    from octavo_engine.models.encoder_config import EncoderConfig
    from octavo_engine.ops import EncoderOps, Loader, Value


class ModernBert:
    """Token ids to hidden states."""

    def __init__(self, config: EncoderConfig, loader: Loader, max_model_len: int) -> None:
        ropes = Ropes(max_model_len)
        self.words = loader.embedding(
            "embeddings.tok_embeddings", config.vocab_size, config.hidden_size
        )
        self.norm = Norm(config, loader, "embeddings.norm")
        self.layers = [
            ModernBertLayer(config, loader, index, ropes) for index in range(config.num_layers)
        ]
        self.final_norm = Norm(config, loader, "final_norm")

    def forward(self, ops: EncoderOps) -> Value:
        x = self.norm.forward(ops, ops.embedding(self.words))
        for layer in self.layers:
            x = layer.forward(ops, x)
        return self.final_norm.forward(ops, x)


class ModernBertLayer:
    """Attention, then a gated MLP. The first layer finds its input normed already."""

    def __init__(self, config: EncoderConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        prefix = f"layers.{index}"
        size = config.hidden_size
        self.attention_norm = Norm(config, loader, f"{prefix}.attn_norm") if index else None
        self.qkv = loader.linear(f"{prefix}.attn.Wqkv", size, 3 * size, bias=config.attention_bias)
        self.spec = encoder_spec(config, index, ropes)
        self.output = loader.linear(f"{prefix}.attn.Wo", size, size, bias=config.attention_bias)
        self.mlp_norm = Norm(config, loader, f"{prefix}.mlp_norm")
        width = config.intermediate_size
        self.up = loader.linear(f"{prefix}.mlp.Wi", size, 2 * width, bias=config.mlp_bias)
        self.down = loader.linear(f"{prefix}.mlp.Wo", width, size, bias=config.mlp_bias)
        self.activation = config.activation

    def forward(self, ops: EncoderOps, x: Value) -> Value:
        h = x if self.attention_norm is None else self.attention_norm.forward(ops, x)
        h = ops.encoder_attention(ops.linear(h, self.qkv), self.spec)
        x = ops.add(x, ops.linear(h, self.output))
        h = ops.linear(self.mlp_norm.forward(ops, x), self.up)
        return ops.add(x, ops.linear(ops.glu(h, self.activation), self.down))
