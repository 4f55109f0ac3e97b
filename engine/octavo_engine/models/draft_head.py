"""Heads with layers of their own that draft from a model's hidden states: EAGLE's, EAGLE-3's, and
the prediction layers in the checkpoints of DeepSeek, GLM and Qwen3-Next.

A row is a position: the model's state of the token there, and the embedding of the token behind it.
Its logits are of the token behind that one. A head's own state stands in for the model's where
there is none yet.

embedding of the next token ──┬─ linear ── layers ── head ── logits
state (or norm of it) ────────┘              └────────────── state of the next pass
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from octavo_engine.models.gemma import Gemma
from octavo_engine.models.gpt import Gpt
from octavo_engine.models.hybrid import Hybrid, HybridLayer
from octavo_engine.models.layers import Attention, Mlp, Ropes
from octavo_engine.models.llama import Llama, LlamaLayer
from octavo_engine.ops import STATE, layer_output

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import DraftOps, Loader, Model, Ops, Value, Vector

DraftHeadKind = Literal["eagle", "eagle3", "mtp"]
Sharing = Llama | Gemma | Gpt | Hybrid  # whose embedding, last norm and output a head can use


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadConfig:
    """What a head's page needs to know beside the shape of its layers."""

    kind: DraftHeadKind
    layers: ModelConfig  # its layers, as a model's
    model: ModelConfig  # that it drafts for
    kept: tuple[int, ...]  # behind so many layers the model's state is taken, side by side
    num_tokens: int  # that it has logits for
    has_fc_bias: bool = False
    has_input_norms: bool = False  # of the embedding and the state, in EAGLE
    has_own_embedding: bool = False
    has_own_output: bool = False
    norms_residual: bool = False  # EAGLE-3: the state goes on as it is normed

    @property
    def kept_names(self) -> tuple[str, ...]:
        return tuple(layer_output(count - 1) for count in self.kept)


class DraftHead(Protocol):
    """A head that keeps STATE, of the rows that become logits."""

    def first(self, ops: DraftOps) -> Value:
        """Logits, from the model's own states."""

    def next(self, ops: DraftOps) -> Value:
        """Logits, from the states of the pass before."""


def has_parts_to_share(model: Model) -> bool:
    """Whether a head finds a model's embedding, last norm and output."""
    return isinstance(model, Sharing)


def build_draft_head(
    config: DraftHeadConfig, loader: Loader, model: Model, max_model_len: int
) -> DraftHead:
    """The caller ends with `loader.finish()`."""
    assert isinstance(model, Sharing), "checked when the files were opened"
    match config.kind:
        case "eagle":
            return Eagle(config, loader, model, max_model_len)
        case "eagle3":
            return Eagle3(config, loader, model, max_model_len)
        case "mtp":
            return PredictionLayer(config, loader, model, max_model_len)


class FromState:
    """Proposes from a state as wide as the model's: first the model's own, normed."""

    model: Sharing

    def first(self, ops: DraftOps) -> Value:
        state = ops.input(self.model.body.config.hidden_size)
        return self._from(ops, self.model.body.normed(ops, state))

    def next(self, ops: DraftOps) -> Value:
        return self._from(ops, ops.input(self.model.body.config.hidden_size))

    def _from(self, ops: DraftOps, state: Value) -> Value:
        raise NotImplementedError


class Eagle(FromState):
    """A linear layer over [embedding, state], and layers as Llama's, of which the first has no norm
    before its attention."""

    def __init__(
        self, config: DraftHeadConfig, loader: Loader, model: Sharing, max_len: int
    ) -> None:
        layers, size = config.layers, config.layers.hidden_size
        self.eps = layers.norm_eps
        self.model = model
        self.fc = JoinedLinear(loader, "fc", size, bias=config.has_fc_bias)
        self.embedding_norm = self.state_norm = None
        if config.has_input_norms:
            self.embedding_norm = loader.vector("embedding_layernorm.weight", size)
            self.state_norm = loader.vector("hidden_states_layernorm.weight", size)
        ropes = Ropes(max_len)
        self.layer = EagleLayer(layers, loader, ropes)
        self.others = [
            LlamaLayer(layers, loader, index, ropes) for index in range(1, layers.num_layers)
        ]

    def _from(self, ops: DraftOps, state: Value) -> Value:
        embedding = ops.embedding(self.model.body.embedding)
        if self.embedding_norm is not None:
            embedding = ops.rms_norm(embedding, self.embedding_norm, self.eps)
            state = ops.rms_norm(state, self.state_norm, self.eps)
        x = self.layer.forward(ops, self.fc.forward(ops, embedding, state))
        for layer in self.others:
            x = layer.forward(ops, x)
        x = ops.keep(STATE, ops.select_rows(x))
        return self.model.head.forward(ops, x)


class JoinedLinear:
    """A linear layer over two values side by side, as the sum of one over each."""

    def __init__(self, loader: Loader, name: str, size: int, *, bias: bool = False) -> None:
        self.embedding = loader.linear(f"{name}.embedding", size, size)
        self.state = loader.linear(f"{name}.state", size, size, bias=bias)

    def forward(self, ops: Ops, embedding: Value, state: Value) -> Value:
        return ops.add(ops.linear(embedding, self.embedding), ops.linear(state, self.state))


class EagleLayer:
    """Attention without a norm before it, then a gated MLP."""

    def __init__(self, config: ModelConfig, loader: Loader, ropes: Ropes) -> None:
        self.eps = config.norm_eps
        self.attention = Attention(config, loader, 0, ropes)
        self.mlp_norm = loader.vector(
            "model.layers.0.post_attention_layernorm.weight", config.hidden_size
        )
        self.mlp = Mlp(config, loader, 0)

    def forward(self, ops: Ops, x: Value) -> Value:
        x = ops.add(x, self.attention.forward(ops, x))
        return ops.add(x, self.mlp.forward(ops, ops.rms_norm(x, self.mlp_norm, self.eps)))


class Eagle3:
    """States of several of the model's layers through a linear layer, beside the embedding into the
    first layer's attention."""

    def __init__(
        self, config: DraftHeadConfig, loader: Loader, model: Sharing, max_len: int
    ) -> None:
        layers, size = config.layers, config.layers.hidden_size
        self.config, self.model = config, model
        self.state_size = len(config.kept) * config.model.hidden_size
        self.embedding = model.body.embedding
        if config.has_own_embedding:
            self.embedding = loader.embedding("embed_tokens", layers.vocab_size, size)
        self.fc = loader.linear("fc", self.state_size, size, bias=config.has_fc_bias)
        ropes = Ropes(max_len)
        self.layer = Eagle3Layer(config, loader, ropes)
        self.others = [
            LlamaLayer(layers, loader, index, ropes) for index in range(1, layers.num_layers)
        ]
        self.norm = loader.vector("norm.weight", size)
        self.output = None
        if config.has_own_output:
            self.output = loader.linear("lm_head", size, config.num_tokens)

    def first(self, ops: DraftOps) -> Value:
        return self._from(ops, ops.linear(ops.input(self.state_size), self.fc))

    def next(self, ops: DraftOps) -> Value:
        return self._from(ops, ops.input(self.config.layers.hidden_size))

    def _from(self, ops: DraftOps, state: Value) -> Value:
        x = self.layer.forward(ops, ops.embedding(self.embedding), state)
        for layer in self.others:
            x = layer.forward(ops, x)
        x = ops.keep(STATE, ops.select_rows(x))
        x = ops.rms_norm(x, self.norm, self.config.layers.norm_eps)
        if self.output is None:
            return self.model.head.forward(ops, x)
        return ops.linear(x, self.output)


class Eagle3Layer:
    """Attention over [normed embedding, normed state], added to the state; then a gated MLP."""

    def __init__(self, config: DraftHeadConfig, loader: Loader, ropes: Ropes) -> None:
        layers, prefix = config.layers, "model.layers.0"
        size = layers.hidden_size
        self.eps, self.norms_residual = layers.norm_eps, config.norms_residual
        self.embedding_norm = loader.vector(f"{prefix}.input_layernorm.weight", size)
        self.state_norm = loader.vector(f"{prefix}.hidden_norm.weight", size)
        self.attention = Attention(layers, loader, 0, ropes)  # of it the projections of the state
        q_size, kv_size = layers.num_heads * layers.head_dim, layers.num_kv_heads * layers.head_dim
        self.embedding_qkv = loader.linear(
            [f"{prefix}.self_attn.{name}_proj.embedding" for name in "qkv"],
            size,
            [q_size, kv_size, kv_size],
        )
        self.mlp_norm = loader.vector(f"{prefix}.post_attention_layernorm.weight", size)
        self.mlp = Mlp(layers, loader, 0)

    def forward(self, ops: Ops, embedding: Value, state: Value) -> Value:
        embedding = ops.rms_norm(embedding, self.embedding_norm, self.eps)
        normed = ops.rms_norm(state, self.state_norm, self.eps)
        qkv = ops.add(
            ops.linear(embedding, self.embedding_qkv), ops.linear(normed, self.attention.qkv)
        )
        h = ops.linear(ops.attention(qkv, self.attention.spec), self.attention.output)
        x = ops.add(normed if self.norms_residual else state, h)
        return ops.add(x, self.mlp.forward(ops, ops.rms_norm(x, self.mlp_norm, self.eps)))


class PredictionLayer(FromState):
    """One more layer of the model behind a linear layer over [normed embedding, normed state]."""

    def __init__(
        self, config: DraftHeadConfig, loader: Loader, model: Sharing, max_len: int
    ) -> None:
        layers, prefix, ropes = config.layers, "model.layers.0", Ropes(max_len)

        def norm(name: str) -> Vector:
            return loader.vector(
                f"{prefix}.{name}.weight", layers.hidden_size, offset=layers.block.norm_offset
            )

        self.eps = layers.norm_eps
        self.model = model
        self.embedding_norm, self.state_norm = norm("enorm"), norm("hnorm")
        self.fc = JoinedLinear(loader, f"{prefix}.eh_proj", layers.hidden_size)
        self.norm = norm("shared_head.norm")
        # Qwen3-Next's next pass takes its state as it is normed, the others' as it was before.
        self.norms_state = isinstance(model, Hybrid)
        kind = HybridLayer if isinstance(model, Hybrid) else LlamaLayer
        self.layer: LlamaLayer | HybridLayer = kind(layers, loader, 0, ropes)

    def _from(self, ops: DraftOps, state: Value) -> Value:
        embedding = ops.rms_norm(
            ops.embedding(self.model.body.embedding), self.embedding_norm, self.eps
        )
        state = ops.rms_norm(state, self.state_norm, self.eps)
        x = ops.select_rows(self.layer.forward(ops, self.fc.forward(ops, embedding, state)))
        if self.norms_state:
            x = ops.keep(STATE, ops.rms_norm(x, self.norm, self.eps))
            return self.model.head.forward(ops, x)
        x = ops.keep(STATE, x)
        return self.model.head.forward(ops, ops.rms_norm(x, self.norm, self.eps))
