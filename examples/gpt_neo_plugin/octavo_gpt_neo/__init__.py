"""GPT-Neo: GPT-2 with unscaled attention, and a window in every second layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.models.config import LayerConfig
from octavo_engine.models.families import Family
from octavo_engine.ops import AttentionSpec

if TYPE_CHECKING:
    from octavo_engine.models.block import BlockConfig
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.fields import ConfigFields
    from octavo_engine.ops import Loader, Ops, Value


class GptNeo:
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, loader: Loader, max_model_len: int) -> None:
        rows, size = config.max_position_embeddings, config.hidden_size
        self.words = loader.embedding("transformer.wte", config.vocab_size, size)
        self.positions = loader.embedding("transformer.wpe", rows, size)
        self.layers = [GptNeoLayer(config, loader, index) for index in range(config.num_layers)]
        self.norm = Norm(config, loader, "transformer.ln_f")
        tied = config.tie_word_embeddings
        self.head = (
            loader.tied(self.words) if tied else loader.linear("lm_head", size, config.vocab_size)
        )

    def forward(self, ops: Ops) -> Value:
        x = ops.add(ops.embedding(self.words), ops.table(self.positions, "positions"))
        for layer in self.layers:
            x = layer.forward(ops, x)
        return ops.linear(self.norm.forward(ops, ops.select_rows(x)), self.head)


class GptNeoLayer:
    """Attention, then an MLP, each normed before and added to the residual after."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        prefix = f"transformer.h.{index}"
        size, width = config.hidden_size, config.intermediate_size
        self.attention_norm = Norm(config, loader, f"{prefix}.ln_1")
        attention = f"{prefix}.attn.attention"
        self.qkv = loader.linear([f"{attention}.{part}_proj" for part in "qkv"], size, [size] * 3)
        self.spec = AttentionSpec(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            scale=1.0,
            window=config.layers[index].window,
        )
        self.output = loader.linear(f"{attention}.out_proj", size, size, bias=True)
        self.mlp_norm = Norm(config, loader, f"{prefix}.ln_2")
        self.up = loader.linear(f"{prefix}.mlp.c_fc", size, width, bias=True)
        self.down = loader.linear(f"{prefix}.mlp.c_proj", width, size, bias=True)
        self.activation = config.activation

    def forward(self, ops: Ops, x: Value) -> Value:
        h = ops.linear(self.attention_norm.forward(ops, x), self.qkv)
        x = ops.add(x, ops.linear(ops.attention(h, self.spec), self.output))
        h = ops.linear(self.mlp_norm.forward(ops, x), self.up)
        return ops.add(x, ops.linear(ops.activation(h, self.activation), self.down))


class Norm:
    """A layer norm with its weights."""

    def __init__(self, config: ModelConfig, loader: Loader, name: str) -> None:
        self.weight = loader.vector(f"{name}.weight", config.hidden_size)
        self.bias = loader.vector(f"{name}.bias", config.hidden_size)
        self.eps = config.norm_eps

    def forward(self, ops: Ops, x: Value) -> Value:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


def read(fields: ConfigFields, block: BlockConfig) -> dict[str, Any]:
    """What no alias can say: which layers see a window only. Fields of ModelConfig by name."""
    kinds = fields.raw("attention_layers")
    if not isinstance(kinds, list) or not set(kinds) <= {"global", "local"}:
        raise fields.error("attention_layers", "must be a list of global and local")
    window = fields.integer("window_size", maximum=1 << 28)
    layers = [LayerConfig(window if kind == "local" else None, rope=None) for kind in kinds]
    return {"layers": tuple(layers)}


FAMILY = Family(
    page=GptNeo,
    has_mlp_ratio=True,
    aliases={
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    read=read,
    defaults={
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "window_size": 256,
        "tie_word_embeddings": True,
    },
)
