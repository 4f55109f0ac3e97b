"""Gemma 2 and Gemma 3's text part: blocks are normed before and after, norms weigh by 1 + w.

x ── norm ── attention ── norm ──(+)── norm ── mlp ── norm ──(+)── x
 └───────────────────────────────┘ └─────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.layers import Attention, Mlp, TextBody, TextModel

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.layers import Ropes
    from octavo_engine.ops import Loader, Ops, Value, Vector

NORM_OFFSET = 1.0  # a stored norm weight of 0 leaves the values as they are


class Gemma(TextModel["GemmaBody"]):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        super().__init__(GemmaBody(config, loader, max_model_len), config, loader)


class GemmaBody(TextBody):
    """All but the head."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len, GemmaLayer, norm_offset=NORM_OFFSET)


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
