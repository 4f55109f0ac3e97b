"""Models whose layers mix tokens in different ways: by attention, or by a state that goes on from
token to token.

x ── norm ── mixer ──(+)── norm ── mlp ──(+)── x
 └────────────────────┘ └─────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.layers import Attention, Mlp, OutputHead, Ropes
from octavo_engine.models.mixers import GatedConv

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.gpt import Module
    from octavo_engine.ops import Loader, Ops, Value


class Hybrid:
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        ropes = Ropes(max_model_len)
        self.config = config
        self.embedding = loader.embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        self.layers = [
            HybridLayer(config, loader, index, ropes) for index in range(config.num_layers)
        ]
        self.norm = loader.vector("model.norm.weight", config.hidden_size)
        self.head = OutputHead(config, loader, self.embedding)

    def forward(self, ops: Ops) -> Value:
        x = ops.embedding(self.embedding, scale=self.config.embedding_scale)
        for layer in self.layers:
            x = layer.forward(ops, x)
        x = ops.rms_norm(ops.select_rows(x), self.norm, self.config.norm_eps)
        return self.head.forward(ops, x)


class HybridLayer:
    """A mixer, then an MLP, each normed before, added to the residual after."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        prefix = f"model.layers.{index}"
        self.config = config
        self.input_norm = loader.vector(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self.mixer: Module
        if config.layers[index].mixer == "attention":
            self.mixer = Attention(config, loader, index, ropes)
        else:
            self.mixer = GatedConv(config, loader, index)
        self.mlp_norm = loader.vector(
            f"{prefix}.post_attention_layernorm.weight", config.hidden_size
        )
        self.mlp = Mlp(config, loader, index)

    def forward(self, ops: Ops, x: Value) -> Value:
        eps, scale = self.config.norm_eps, self.config.residual_scale
        h = self.mixer.forward(ops, ops.rms_norm(x, self.input_norm, eps))
        x = ops.add(x, h, scale=scale)
        h = self.mlp.forward(ops, ops.rms_norm(x, self.mlp_norm, eps))
        return ops.add(x, h, scale=scale)
