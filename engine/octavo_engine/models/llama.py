"""Llama and its kin (Mistral, Mixtral, SmolLM, Qwen, Phi-3, Granite, DeepSeek); they differ in
ModelConfig only.

x ── norm ── qkv ── attention ── o ──(+)── norm ── gate_up ── glu ── down ──(+)── x
 └───────────────────────────────────┘ └──────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.latent import LatentAttention
from octavo_engine.models.layers import Attention, Experts, Mlp, TextBody, TextModel

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.layers import Ropes
    from octavo_engine.ops import Loader, Ops, Value


class Llama(TextModel["LlamaBody"]):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        super().__init__(LlamaBody(config, loader, max_model_len), config, loader)


class LlamaBody(TextBody):
    """All but the head."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        super().__init__(config, loader, max_model_len, LlamaLayer)


class LlamaLayer:
    """Attention, then a gated MLP or experts, each normed before, added to the residual after."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        prefix = f"model.layers.{index}"
        self.config = config
        self.input_norm = loader.vector(f"{prefix}.input_layernorm.weight", config.hidden_size)
        kind = Attention if config.latent is None else LatentAttention
        self.attention = kind(config, loader, index, ropes)
        self.mlp_norm = loader.vector(
            f"{prefix}.post_attention_layernorm.weight", config.hidden_size
        )
        has_experts = config.layers[index].has_experts
        self.mlp = (Experts if has_experts else Mlp)(config, loader, index)

    def forward(self, ops: Ops, x: Value) -> Value:
        eps, scale = self.config.norm_eps, self.config.residual_scale
        h = self.attention.forward(ops, ops.rms_norm(x, self.input_norm, eps))
        x = ops.add(x, h, scale=scale)
        h = self.mlp.forward(ops, ops.rms_norm(x, self.mlp_norm, eps))
        return ops.add(x, h, scale=scale)
