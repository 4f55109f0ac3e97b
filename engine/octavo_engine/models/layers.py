"""The parts that model pages share: attention with its projections, the gated MLP, the head."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, cast

from octavo_engine.models.alibi import alibi_slopes
from octavo_engine.models.rope import make_rope
from octavo_engine.ops import HIDDEN, AttentionSpec, ExpertsSpec, layer_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.models.config import ModelConfig
    from octavo_engine.models.rope import RopeConfig
    from octavo_engine.ops import Embedding, EncoderOps, Loader, Ops, Rope, Value


class Layer(Protocol):
    """From the rows behind the layer before it to those behind itself."""

    def forward(self, ops: Ops, x: Value) -> Value: ...


def run_layers(ops: Ops, layers: Sequence[Layer], x: Value, *, num_deep: int = 0) -> Value:
    """One after another. What is behind each is kept under its name. Behind the first `num_deep`
    more of the pictures' rows are added."""
    for index, layer in enumerate(layers):
        x = layer.forward(ops, x)
        if index < num_deep:
            x = ops.add_picture_rows(x, index + 1)
        x = ops.keep(layer_output(index), x)
    return x


class Ropes:
    """Each rope made once, so that layers which share it also share a backend's table of angles."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._made: dict[RopeConfig, Rope] = {}

    def get(self, config: RopeConfig | None) -> Rope | None:
        if config is None:
            return None
        if config not in self._made:
            self._made[config] = make_rope(config, self._max_model_len)
        return self._made[config]


class Attention:
    """q, k and v in one projection, attention as the layer wants it, and the output projection."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        index: int,
        ropes: Ropes,
        *,
        norm_offset: float = 0.0,
    ) -> None:
        prefix = f"model.layers.{index}.self_attn"
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        if config.family.fused_qkv:
            self.qkv = loader.linear(
                f"{prefix}.qkv_proj", config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias
            )
        else:
            self.qkv = loader.linear(
                [f"{prefix}.{name}_proj" for name in "qkv"],
                config.hidden_size,
                [q_size, kv_size, kv_size],
                bias=config.qkv_bias,
            )
        self.output = loader.linear(
            f"{prefix}.o_proj", q_size, config.hidden_size, bias=config.output_bias
        )
        block = config.block
        q_norm = k_norm = None
        if config.family.qk_norm or block.qk_norm in ("head", "roped"):
            q_norm = loader.vector(f"{prefix}.q_norm.weight", config.head_dim, offset=norm_offset)
            k_norm = loader.vector(f"{prefix}.k_norm.weight", config.head_dim, offset=norm_offset)
        elif block.qk_norm != "none":
            q_norm = loader.vector(f"{prefix}.q_norm.weight", q_size)
            k_norm = loader.vector(f"{prefix}.k_norm.weight", kv_size)
        self.is_whole = config.is_whole
        layer = config.layers[index]
        if block.qk_norm == "roped" and layer.rope is None:
            q_norm = k_norm = None
        self.spec = AttentionSpec(
            layer=config.cache_index(index),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=ropes.get(layer.rope),
            window=layer.window,
            soft_cap=config.attention_soft_cap,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
            norm="row" if block.qk_norm == "row" else block.qk_norm_kind,
            norm_after_rope=block.qk_norm_after_rope,
            alibi=alibi_slopes(config) if block.positions == "alibi" else None,
            sinks=loader.vector(f"{prefix}.sinks", config.num_heads)
            if config.family.has_sinks
            else None,
            is_chunked=layer.is_chunked,
            temperature=config.temperature if layer.rope is None else None,
        )
        self.clip = block.qkv_clip

    def forward(self, ops: Ops, x: Value) -> Value:
        qkv = ops.linear(x, self.qkv)
        if self.clip is not None:
            qkv = ops.clamp(qkv, self.clip)
        if self.is_whole:
            x = cast("EncoderOps", ops).encoder_attention(qkv, self.spec)
        else:
            x = ops.attention(qkv, self.spec)
        return ops.linear(x, self.output)


class Mlp:
    """down(activation(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        index: int,
        *,
        name: str = "mlp",
        width: int | None = None,
    ) -> None:
        prefix = f"model.layers.{index}.{name}"
        width = width or config.intermediate_size
        if config.family.fused_gate_up:
            self.gate_up = loader.linear(
                f"{prefix}.gate_up_proj", config.hidden_size, 2 * width, bias=config.mlp_bias
            )
        else:
            self.gate_up = loader.linear(
                [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
                config.hidden_size,
                [width, width],
                bias=config.mlp_bias,
            )
        self.down = loader.linear(
            f"{prefix}.down_proj", width, config.hidden_size, bias=config.mlp_bias
        )
        self.activation = config.activation

    def forward(self, ops: Ops, x: Value) -> Value:
        return ops.linear(ops.glu(ops.linear(x, self.gate_up), self.activation), self.down)


class Experts:
    """A router, and as many gated MLPs as there are experts, of which a token meets a few."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int) -> None:
        experts = config.experts
        assert experts is not None, "the layer has them"
        names = _EXPERT_NAMES[config.family.experts]
        prefix = f"model.layers.{index}.{names.module}"
        places = [f"{prefix}.experts.{number}" for number in range(experts.num_experts)]
        bias = experts.has_biases
        self.router = loader.linear(
            f"{prefix}.gate", config.hidden_size, experts.num_experts, bias=bias
        )
        self.gate_up = loader.experts(
            [[f"{place}.{names.gate}", f"{place}.{names.up}"] for place in places],
            config.hidden_size,
            [experts.width, experts.width],
            bias=bias,
        )
        self.down = loader.experts(
            [[f"{place}.{names.down}"] for place in places],
            experts.width,
            [config.hidden_size],
            bias=bias,
        )
        routing = experts.routing
        choice_bias = None
        if routing.has_bias:
            choice_bias = loader.vector(
                f"{prefix}.gate.e_score_correction_bias", experts.num_experts
            )
        self.spec = ExpertsSpec(
            experts.top_k,
            experts.renormalise,
            config.activation,
            is_sigmoid=routing.is_sigmoid,
            bias=choice_bias,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            best_of_group=routing.best_of_group,
            scale=routing.scale,
            weighs_inputs=experts.weighs_inputs,
        )
        self.shared: SharedExpert | Mlp | None = None
        if experts.shared_width and config.family.experts in ("grouped", "llama4"):
            name, width = f"{names.module}.shared_experts", experts.shared_width
            self.shared = Mlp(config, loader, index, name=name, width=width)
        elif experts.shared_width:
            self.shared = SharedExpert(config, loader, index, experts.shared_width)

    def forward(self, ops: Ops, x: Value) -> Value:
        scores = ops.linear(x, self.router)
        chosen = ops.experts(x, scores, self.gate_up, self.down, self.spec)
        return chosen if self.shared is None else ops.add(chosen, self.shared.forward(ops, x))


class SharedExpert:
    """An MLP that every token meets, as far as a gate of its own lets it through."""

    def __init__(self, config: ModelConfig, loader: Loader, index: int, width: int) -> None:
        self.mlp = Mlp(config, loader, index, name="mlp.shared_expert", width=width)
        self.gate = loader.linear(
            f"model.layers.{index}.mlp.shared_expert_gate", config.hidden_size, 1
        )

    def forward(self, ops: Ops, x: Value) -> Value:
        return ops.gate(self.mlp.forward(ops, x), ops.linear(x, self.gate))


class _ExpertNames(NamedTuple):
    module: str
    gate: str
    up: str
    down: str


_EXPERT_NAMES = MappingProxyType(
    {
        "mixtral": _ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        "qwen": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        "gpt-oss": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        "llama4": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        "grouped": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        "jamba": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        "qwen-shared": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    }
)


class OutputHead:
    """The last hidden state to logits; the matrix is the embedding's own where they are tied."""

    def __init__(self, config: ModelConfig, loader: Loader, embedding: Embedding) -> None:
        self.scale = config.logits_scale
        self.soft_cap = config.final_soft_cap
        if config.tie_word_embeddings:
            self.weight = loader.tied(embedding)
        else:
            self.weight = loader.linear(
                "lm_head", config.hidden_size, config.vocab_size, bias=config.block.head_bias
            )

    def forward(self, ops: Ops, x: Value) -> Value:
        logits = ops.linear(ops.keep(HIDDEN, x), self.weight)
        if self.scale != 1.0:
            logits = ops.scale(logits, self.scale)
        if self.soft_cap is not None:
            logits = ops.soft_cap(logits, self.soft_cap)
        return logits


class ModelBody(Protocol):
    """All of a model but its head: token ids to hidden states, which are still to be normed."""

    embedding: Embedding

    def forward(self, ops: Ops) -> Value: ...

    def normed(self, ops: Ops, x: Value) -> Value: ...


BodyT = TypeVar("BodyT", bound=ModelBody)


class TextModel(Generic[BodyT]):
    """Token ids to logits: a body, and the head over the rows that are wanted."""

    def __init__(self, body: BodyT, config: ModelConfig, loader: Loader) -> None:
        self.body = body
        self.head = OutputHead(config, loader, body.embedding)

    def forward(self, ops: Ops) -> Value:
        x = self.body.forward(ops)
        return self.head.forward(ops, self.body.normed(ops, ops.select_rows(x)))


class LayerMaker(Protocol):
    """A class of layers."""

    def __call__(self, config: ModelConfig, loader: Loader, index: int, ropes: Ropes, /) -> Layer:
        """The layer of an index."""


class TextBody:
    """A ModelBody of an embedding, layers of one class, and a norm of roots."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        max_model_len: int,
        make_layer: LayerMaker,
        *,
        norm_offset: float = 0.0,
    ) -> None:
        ropes = Ropes(max_model_len)
        self.config = config
        self.embedding = token_embedding(config, loader)
        self.layers = [
            make_layer(config, loader, index, ropes) for index in range(config.num_layers)
        ]
        self.norm = loader.vector("model.norm.weight", config.hidden_size, offset=norm_offset)

    def forward(self, ops: Ops) -> Value:
        x = ops.embedding(self.embedding, scale=self.config.embedding_scale)
        return run_layers(ops, self.layers, x, num_deep=self.config.num_deep_rows)

    def normed(self, ops: Ops, x: Value) -> Value:
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


def token_embedding(config: ModelConfig, loader: Loader) -> Embedding:
    """The table under the name that most checkpoints give it."""
    return loader.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
