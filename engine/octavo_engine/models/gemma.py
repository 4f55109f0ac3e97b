"""Gemma 2 and Gemma 3's text part: blocks are normed before and after, norms weigh by 1 + w.

x ── norm ── attention ── norm ──(+)── norm ── mlp ── norm ──(+)── x
 └───────────────────────────────┘ └─────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.layers import Attention, Mlp, OutputHead, Ropes, run_layers

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Loader, Ops, Value, Vector

NORM_OFFSET = 1.0  # a stored norm weight of 0 leaves the values as they are


class Gemma:
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        self.body = GemmaBody(config, loader, max_model_len)
        self.head = OutputHead(config, loader, self.body.embedding)

    def forward(self, ops: Ops) -> Value:
        x = self.body.forward(ops)
        return self.head.forward(ops, self.body.normed(ops, ops.select_rows(x)))


class GemmaBody:
    """All but the head: token ids to hidden states, which are still to be normed."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        ropes = Ropes(max_model_len)
        self.config = config
        self.embedding = loader.embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        self.layers = [
            GemmaLayer(config, loader, index, ropes) for index in range(config.num_layers)
        ]
        self.norm = loader.vector("model.norm.weight", config.hidden_size, offset=NORM_OFFSET)

    def forward(self, ops: Ops) -> Value:
        x = ops.embedding(self.embedding, scale=self.config.embedding_scale)
        return run_layers(ops, self.layers, x)

    def normed(self, ops: Ops, x: Value) -> Value:
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


class GemmaLayer:
    """Attention, then a gated MLP, each between two norms."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        def norm(name: str) -> Vector:
            name = f"model.layers.{index}.{name}.weight"
            return loader.vector(name, config.hidden_size, offset=NORM_OFFSET)

        self.eps = config.norm_eps
        self.before_attention = norm("input_layernorm")
        self.attention = Attention(config, loader, index, ropes, norm_offset=NORM_OFFSET)
        self.after_attention = norm("post_attention_layernorm")
        self.before_mlp = norm("pre_feedforward_layernorm")
        self.mlp = Mlp(config, loader, index)
        self.after_mlp = norm("post_feedforward_layernorm")

    def forward(self, ops: Ops, x: Value) -> Value:
        h = self.attention.forward(ops, ops.rms_norm(x, self.before_attention, self.eps))
        x = ops.add(x, ops.rms_norm(h, self.after_attention, self.eps))
        h = self.mlp.forward(ops, ops.rms_norm(x, self.before_mlp, self.eps))
        return ops.add(x, ops.rms_norm(h, self.after_mlp, self.eps))
