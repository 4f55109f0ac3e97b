"""The operations a model may use. Every backend answers to this page; models are written in it.

A model is built once with a `Loader` (its weights, by their Hugging Face names) and then written
down as a function of `Ops`. The torch backend executes each call at once; the native backend
records the calls into a program that csrc runs in one go. So a model may not look at values, only
pass them on.

Values are [rows, columns] in float32. `T` rows stand for the step's tokens; after `select_rows`,
`S` rows stand for the tokens whose logits are wanted. A model that pools has whole texts in a step,
and after `select_rows` or `pool` one row for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

Value: TypeAlias = Any  # a backend's own: a torch tensor, or a recorded value
Linear: TypeAlias = Any  # a weight [out, in] in whatever format, with its bias
Experts: TypeAlias = Any  # as many weights [out, in] as there are experts
Embedding: TypeAlias = Any  # a table [vocabulary, hidden]
Vector: TypeAlias = Any  # a float32 vector, such as a norm's weight

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh"]
HeadNorm = Literal["rms", "layer", "row"]  # row: rms of all heads' columns together
Pool = Literal["mean", "max", "mean_sqrt_len", "weightedmean"]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary position embedding over the first `2 * len(inv_freq)` columns of a head.

    Pairs are (i, i + rotary_dim / 2), as Hugging Face stores them. cos and sin are of
    float32(position) * inv_freq, times `attention_factor`.
    """

    inv_freq: NDArray[np.float32]  # [rotary_dim / 2]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """One layer's paged causal attention over columns [q heads | k heads | v heads]."""

    layer: int  # index into the KV cache
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of q · k
    rope: Rope | None = None
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)
    # Norms of each head before rope, by a weight for its columns or for those of all heads.
    q_norm: Vector | None = None
    k_norm: Vector | None = None
    norm_eps: float = 1e-6
    norm: HeadNorm = "rms"
    norm_after_rope: bool = False
    # Of each q head: a score gains slope * (the key's position - the query's).
    alibi: NDArray[np.float32] | None = None
    is_causal: bool = True  # else a token sees later ones too; encoder_attention only


@dataclass(frozen=True, slots=True)
class CrossSpec:
    """One decoder layer's attention over all that an encoder left of a request."""

    layer: int  # index into the cross cache
    num_heads: int
    head_dim: int
    length: int  # keys, the same number for every request
    scale: float  # of q · k


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """How a token's experts are chosen and weighed: by a softmax of its scores."""

    top_k: int
    renormalise: bool  # weights are shares among the chosen experts, not among all
    activation: Activation


class Loader(Protocol):
    """Hands out weights by name and keeps account of which were taken.

    Raises ModelError at once on a wrong shape; missing names are collected, so that one error lists
    them all (`finish`).
    """

    def embedding(self, name: str, rows: int, columns: int) -> Embedding:
        """The table `name`.weight."""

    def linear(
        self,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        *,
        bias: bool = False,
    ) -> Linear:
        """The weights `names`.weight stacked along their outputs, and `names`.bias if any."""

    def experts(
        self, names: Sequence[Sequence[str]], in_features: int, out_features: Sequence[int]
    ) -> Experts:
        """For each expert the weights of its `names`, stacked along their outputs."""

    def tied(self, embedding: Embedding) -> Linear:
        """The embedding table as the language model's head; shares its memory."""

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Vector:
        """The vector `name` plus `offset`, in float32; `name` is whole, ending and all."""


class Ops(Protocol):
    """What a model is composed of."""

    def embedding(self, table: Embedding, *, scale: float = 1.0) -> Value:
        """The step's token ids looked up in `table`, times scale: [T, hidden]."""

    def table(
        self, table: Embedding, of: Literal["positions", "types"], *, offset: int = 0
    ) -> Value:
        """Rows of a table by the tokens' positions, or the texts of a pair that they are of, plus
        `offset`: [T, hidden]."""

    def linear(self, x: Value, weight: Linear) -> Value:
        """x · weightᵀ + bias in float32; x is rounded to what the weight's format wants."""

    def rms_norm(self, x: Value, weight: Vector, eps: float) -> Value:
        """x / sqrt(mean(x²) + eps) * weight, row by row."""

    def layer_norm(self, x: Value, weight: Vector | None, bias: Vector | None, eps: float) -> Value:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, row by row."""

    def attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        """Norm and rotate q and k, cache k and v, attend: [T, num_heads * head_dim]."""

    def glu(self, x: Value, activation: Activation) -> Value:
        """activation(left half) * right half."""

    def experts(
        self, x: Value, scores: Value, gate_up: Experts, down: Experts, spec: ExpertsSpec
    ) -> Value:
        """The weighted sum over a row's best experts by `scores` (a column for each) of
        down · (activation(left half) * right half of gate_up · x)."""

    def activation(self, x: Value, activation: Activation) -> Value:
        """Element by element."""

    def add(self, x: Value, y: Value, *, scale: float = 1.0) -> Value:
        """x + scale * y."""

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor."""

    def gate(self, x: Value, scores: Value) -> Value:
        """x * sigmoid(scores), of which there is one for each row."""

    def clamp(self, x: Value, limit: float) -> Value:
        """Values beyond ±limit become it."""

    def soft_cap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""

    def select_rows(self, x: Value) -> Value:
        """Only the rows whose logits are wanted: [S, columns]."""


class EncoderOps(Ops, Protocol):
    """What models that read whole texts and generate nothing are composed of besides."""

    def encoder_attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        """As `attention`, over texts that are whole in the step; nothing is kept. Unless causal, a
        window goes both ways."""

    def pool(self, x: Value, how: Pool) -> Value:
        """One row for each text from its tokens' rows: [S, columns]. The k-th of them weighs k in
        a weightedmean."""


class CrossOps(EncoderOps, Protocol):
    """What models with an encoder and a decoder are composed of besides. The encoder's pass has
    features instead of token ids; the decoder's reads what it stored."""

    def features(self, columns: int) -> Value:
        """The step's features: [T, columns]."""

    def shift_rows(self, x: Value) -> Value:
        """The row before each one, zeros for a sequence's first: [T, columns]."""

    def store_cross(self, kv: Value, spec: CrossSpec) -> None:
        """Keep the keys and values of columns [k heads | v heads] in the sequence's slot."""

    def cross_attention(self, q: Value, spec: CrossSpec) -> Value:
        """Attend from columns [q heads] to all that is kept in the sequence's slot, whatever the
        token's position: [T, num_heads * head_dim]."""


class Model(Protocol):
    """A model family: weights taken from a loader, and one forward pass over ops."""

    def forward(self, ops: Ops) -> Value:
        """The logits of the selected rows: [S, vocabulary]."""


class EncoderDecoder(Model, Protocol):
    """A model whose requests bring features, which an encoder reads first."""

    def encode(self, ops: CrossOps) -> Value:
        """Store what the decoder's layers attend to. Returns the encoder's last hidden states."""
