"""Latent attention as model pages use it: a token leaves one vector behind, whatever the heads.

The rest of such a model is as Llama's page has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo_engine.ops import LatentAttentionSpec

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.layers import Ropes
    from octavo_engine.ops import LatentLoader, LatentOps, Loader, Ops, Value

# Of the norms within attention, whatever the model's others have.
NORM_EPS = 1e-6


class LatentAttention:
    """Queries by one projection or two, the latent vector by another, and the output projection."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes) -> None:
        latent = config.latent
        assert latent is not None, "the layer has it"
        prefix = f"model.layers.{index}.self_attn"
        hidden, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
        queries = heads * (latent.nope_dim + latent.rope_dim)
        self.query_down = self.query_norm = None
        if latent.query_rank is None:
            self.query = loader.linear(f"{prefix}.q_proj", hidden, queries)
        else:
            rank = latent.query_rank
            self.query_down = loader.linear(f"{prefix}.q_a_proj", hidden, rank, bias=bias)
            self.query_norm = loader.vector(f"{prefix}.q_a_layernorm.weight", rank)
            self.query = loader.linear(f"{prefix}.q_b_proj", rank, queries)
        self.kv = loader.linear(
            f"{prefix}.kv_a_proj_with_mqa", hidden, latent.rank + latent.rope_dim, bias=bias
        )
        self.key_up, self.value_up = cast("LatentLoader", loader).latent_heads(
            f"{prefix}.kv_b_proj", heads, latent.nope_dim, latent.value_dim, latent.rank
        )
        self.output = loader.linear(
            f"{prefix}.o_proj", heads * latent.value_dim, hidden, bias=config.output_bias
        )
        rope = ropes.get(config.layers[index].rope)
        assert rope is not None, "each layer of latent attention has one"
        self.spec = LatentAttentionSpec(
            layer=index,
            num_heads=heads,
            nope_dim=latent.nope_dim,
            rope=rope,
            rank=latent.rank,
            value_dim=latent.value_dim,
            scale=config.attention_scale,
            kv_norm=loader.vector(f"{prefix}.kv_a_layernorm.weight", latent.rank),
            norm_eps=NORM_EPS,
            turns_neighbours=latent.turns_neighbours,
            window=config.layers[index].window,
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        kv = ops.linear(x, self.kv)
        if self.query_down is not None:
            x = ops.rms_norm(ops.linear(x, self.query_down), self.query_norm, NORM_EPS)
        q = ops.linear(x, self.query)
        x = cast("LatentOps", ops).latent_attention(q, kv, self.key_up, self.value_up, self.spec)
        return ops.linear(x, self.output)
