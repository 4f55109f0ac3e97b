"""Llama and its kin (Mistral, Mixtral, SmolLM, Qwen, Phi-3, Granite, DeepSeek); they differ in
ModelConfig only.

x ── norm ── qkv ── attention ── o ──(+)── norm ── gate_up ── glu ── down ──(+)── x
 └───────────────────────────────────┘ └──────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.models.latent import LatentAttention
from octavo_engine.models.layers import Attention, Experts, Mlp, OutputHead, Ropes, run_layers

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Loader, Ops, Value


class Llama:
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        self.body = LlamaBody(config, loader, max_model_len)
        self.head = OutputHead(config, loader, self.body.embedding)

    def forward(self, ops: Ops) -> Value:
        x = self.body.forward(ops)
        return self.head.forward(ops, self.body.normed(ops, ops.select_rows(x)))


class LlamaBody:
    """All but the head: token ids to hidden states, which are still to be normed."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        ropes = Ropes(max_model_len)
        self.config = config
        self.embedding = loader.embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        self.layers = [
            LlamaLayer(config, loader, index, ropes) for index in range(config.num_layers)
        ]
        self.norm = loader.vector("model.norm.weight", config.hidden_size)

    def forward(self, ops: Ops) -> Value:
        x = ops.embedding(self.embedding, scale=self.config.embedding_scale)
        return run_layers(ops, self.layers, x, num_deep=self.config.num_deep_rows)

    def normed(self, ops: Ops, x: Value) -> Value:
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


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
