"""Mamba 2 in every layer, and before it in some a transformer block whose weights those share.

                          ┌────────────────────┐
embeddings ──┐            │                    │
x ───────[x | e]── block ── linear ──(+)── norm ── mamba ──(+)── x
 └───────────────────────────────────┘                      │
 └──────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo_engine.models.layers import OutputHead, Ropes
from octavo_engine.models.mixers import Mamba
from octavo_engine.ops import AttentionSpec, layer_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.recurrent_config import SharedBlocks
    from octavo_engine.ops import Loader, Ops, RecurrentOps, Value


class Zamba:
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        shared = config.shared_blocks
        assert shared is not None, "the family has them"
        ropes = Ropes(max_model_len)
        self.config = config
        self.embedding = loader.embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size
        )
        layers = range(config.num_layers)
        with_block = [i for i in layers if config.layers[i].mixer == "attention+mamba2"]
        # Each is stored with the first layer that uses it.
        self.blocks = [
            SharedBlock(config, loader, index) for index in with_block[: shared.num_blocks]
        ]
        self.layers = [ZambaLayer(config, loader, index) for index in layers]
        for use, index in enumerate(with_block):
            number = use % shared.num_blocks
            self.layers[index].use = BlockUse(
                config, loader, self.blocks[number], use, layer=index, ropes=ropes
            )
        self.norm = loader.vector("model.norm.weight", config.hidden_size)
        self.head = OutputHead(config, loader, self.embedding)

    def forward(self, ops: Ops) -> Value:
        embeddings = x = ops.embedding(self.embedding)
        for index, layer in enumerate(self.layers):
            x = ops.keep(layer_output(index), layer.forward(ops, x, embeddings))
        x = ops.rms_norm(ops.select_rows(x), self.norm, self.config.norm_eps)
        return self.head.forward(ops, x)


class ZambaLayer:
    """The residual goes around block and Mamba together: what the block says, only Mamba hears."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        self.eps = config.norm_eps
        self.norm = loader.vector(
            f"model.layers.{index}.input_layernorm.weight", config.hidden_size
        )
        self.mamba = Mamba(config, loader, index)
        self.use: BlockUse | None = None

    def forward(self, ops: Ops, x: Value, embeddings: Value) -> Value:
        h = x if self.use is None else ops.add(x, self.use.forward(ops, x, embeddings))
        return ops.add(x, self.mamba.forward(ops, ops.rms_norm(h, self.norm, self.eps)))


class SharedBlock:
    """The weights of attention and MLP that several layers use."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        self.prefix = prefix = f"model.layers.{index}.shared_transformer"
        hidden, width = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.sizes = [q_size, kv_size, kv_size]
        self.norm = loader.vector(f"{prefix}.input_layernorm.weight", 2 * hidden)
        self.qkv = loader.linear(
            [f"{prefix}.self_attn.{name}_proj" for name in "qkv"], 2 * hidden, self.sizes
        )
        self.output = loader.linear(f"{prefix}.self_attn.o_proj", q_size, hidden)
        self.mlp_norm = loader.vector(f"{prefix}.pre_ff_layernorm.weight", hidden)
        self.gate_up = loader.linear(
            f"{prefix}.feed_forward.gate_up_proj", hidden, 2 * width, bias=config.mlp_bias
        )
        self.down = loader.linear(
            f"{prefix}.feed_forward.down_proj", width, hidden, bias=config.mlp_bias
        )


class BlockUse:
    """A layer's use of a block: a KV cache and low-rank additions of its own, and a projection of
    what comes out."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        block: SharedBlock,
        number: int,
        *,
        layer: int,
        ropes: Ropes,
    ) -> None:
        shared = config.shared_blocks
        assert shared is not None, "the family has them"
        hidden = config.hidden_size
        self.block, self.eps, self.activation = block, config.norm_eps, config.activation
        self.attention = AttentionSpec(
            layer=config.cache_index(layer),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=ropes.get(config.layers[layer].rope),
        )
        self.qkv_addition = None
        if shared.adapts_attention:
            names = [f"{block.prefix}.self_attn.linear_{q}_adapter_list.{number}" for q in "qkv"]
            self.qkv_addition = LowRank(loader, names, 2 * hidden, block.sizes, shared)
        self.gate_up_addition = LowRank(
            loader,
            [f"{block.prefix}.feed_forward.gate_up_proj_adapter_list.{number}"],
            hidden,
            [2 * config.intermediate_size],
            shared,
        )
        self.linear = loader.linear(f"model.layers.{layer}.linear", hidden, hidden)

    def forward(self, ops: Ops, x: Value, embeddings: Value) -> Value:
        block = self.block
        x = cast("RecurrentOps", ops).join(x, embeddings)
        x = ops.rms_norm(x, block.norm, self.eps)
        qkv = ops.linear(x, block.qkv)
        if self.qkv_addition is not None:
            qkv = ops.add(qkv, self.qkv_addition.forward(ops, x))
        x = ops.linear(ops.attention(qkv, self.attention), block.output)
        x = ops.rms_norm(x, block.mlp_norm, self.eps)
        gate_up = ops.add(ops.linear(x, block.gate_up), self.gate_up_addition.forward(ops, x))
        x = ops.linear(ops.glu(gate_up, self.activation), block.down)
        return ops.linear(x, self.linear)


class LowRank:
    """up · down · x for each of some parts of a projection."""

    def __init__(
        self,
        loader: Loader,
        names: Sequence[str],
        in_features: int,
        sizes: Sequence[int],
        shared: SharedBlocks,
    ) -> None:
        self.rank = rank = shared.rank
        self.down = loader.linear([f"{name}.0" for name in names], in_features, [rank] * len(names))
        self.ups = [
            loader.linear(f"{name}.1", rank, size) for name, size in zip(names, sizes, strict=True)
        ]

    def forward(self, ops: Ops, x: Value) -> Value:
        ops = cast("RecurrentOps", ops)
        down = ops.linear(x, self.down)
        if len(self.ups) == 1:
            return ops.linear(down, self.ups[0])
        whole = None
        for place, up in enumerate(self.ups):
            part = ops.linear(ops.columns(down, place * self.rank, self.rank), up)
            whole = part if whole is None else ops.join(whole, part)
        return whole
