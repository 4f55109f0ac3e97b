"""Models whose layers mix tokens in different ways: by attention, or by a state that goes on from
token to token.

x ── norm ── mixer ──(+)── norm ── mlp ──(+)── x
 └────────────────────┘ └─────────────────┘
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from octavo_engine.models.gpt import PlainMlp
from octavo_engine.models.layers import Attention, Experts, Mlp, TextBody, TextModel
from octavo_engine.models.mixers import (
    AttentionBesideMamba,
    GatedAttention,
    GatedConv,
    GatedDelta,
    Mamba,
    ScaledMlp,
    SelectiveMamba,
)

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.gpt import Module
    from octavo_engine.models.layers import Ropes
    from octavo_engine.ops import Loader, Ops, Value


class Hybrid(TextModel["HybridBody"]):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        super().__init__(HybridBody(config, loader, max_model_len), config, loader)


class HybridBody(TextBody):
    """All but the head."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        offset = config.block.norm_offset
        super().__init__(config, loader, max_model_len, HybridLayer, norm_offset=offset)


class HybridLayer:
    """A mixer, then an MLP if there is one, each normed before, added to the residual after."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        prefix = f"model.layers.{index}"
        size, offset = config.hidden_size, config.block.norm_offset
        self.config = config
        self.input_norm = loader.vector(f"{prefix}.input_layernorm.weight", size, offset=offset)
        self.mixer = _mixer(config, loader, index, ropes)
        self.mlps: list[Module] = []  # side by side
        if not config.layers[index].has_mlp:
            return
        self.mlp_norm = loader.vector(
            f"{prefix}.post_attention_layernorm.weight", size, offset=offset
        )
        has_experts = config.layers[index].has_experts
        if has_experts:
            self.mlps.append(Experts(config, loader, index))
        if config.multipliers is not None:
            self.mlps.append(ScaledMlp(config, loader, index))
        elif not has_experts or config.family.experts == "mixtral":
            self.mlps.append(Mlp(config, loader, index))

    def forward(self, ops: Ops, x: Value) -> Value:
        eps, scale = self.config.norm_eps, self.config.residual_scale
        h = self.mixer.forward(ops, ops.rms_norm(x, self.input_norm, eps))
        x = ops.add(x, h, scale=scale)
        if not self.mlps:
            return x
        h = ops.rms_norm(x, self.mlp_norm, eps)
        parts = [mlp.forward(ops, h) for mlp in self.mlps]
        return ops.add(x, functools.reduce(ops.add, parts), scale=scale)


def _mixer(config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> Module:
    match config.layers[index].mixer:
        case "attention" if config.family.naming in ("qwen3_next", "qwen3_5"):
            return GatedAttention(config, loader, index, ropes)
        case "attention":
            return Attention(config, loader, index, ropes)
        case "conv":
            return GatedConv(config, loader, index)
        case "mamba":
            return SelectiveMamba(config, loader, index)
        case "mamba2":
            return Mamba(config, loader, index)
        case "attention+mamba2":
            return AttentionBesideMamba(config, loader, index, ropes)
        case "delta":
            return GatedDelta(config, loader, index)
        case "mlp":
            return (Mlp if config.block.is_gated else PlainMlp)(config, loader, index)
