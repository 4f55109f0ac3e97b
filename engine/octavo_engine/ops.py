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

Names: TypeAlias = "str | Sequence[str]"  # of weights that are stacked along their outputs
Sizes: TypeAlias = "int | Sequence[int]"  # of these outputs
ExpertNames: TypeAlias = "Sequence[Sequence[str]]"  # for each expert, stacked as these
ExpertSizes: TypeAlias = "Sequence[int]"

Value: TypeAlias = Any  # a backend's own: a torch tensor, or a recorded value
Linear: TypeAlias = Any  # a weight [out, in] in whatever format, with its bias
Experts: TypeAlias = Any  # as many weights [out, in] as there are experts, with their biases
Heads: TypeAlias = Any  # a weight [out, in] for each head, in numbers
Embedding: TypeAlias = Any  # a table [vocabulary, hidden]
Vector: TypeAlias = Any  # a float32 vector, such as a norm's weight

# swiglu_clamped is of two halves: both within ±7, the gate times the sigmoid of 1.702 times it, and
# one added to the other half.
Activation = Literal[
    "silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh", "sigmoid", "swiglu_clamped"
]
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
    # How many pairs, in order, turn by a token's place in time, in lines and in columns, where a
    # step says these. None: all turn by its position.
    sections: tuple[int, int, int] | None = None
    # Then these pairs lie in turn: every third of them, as far as they go; what neither lines nor
    # columns have is time's.
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries are multiplied by 1 + scale * log(1 + floor((position + 1) / floor))."""

    floor: float
    scale: float


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
    is_segmented: bool = False  # a token sees its segment of the step, where the step has some
    # Of each q head: a score more in the softmax, of no value.
    sinks: Vector | None = None
    # A text is cut into chunks as long as the window, and a token sees those of its own.
    is_chunked: bool = False
    temperature: QueryTemperature | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttentionSpec:
    """One layer's paged causal attention over latent vectors that all heads share."""

    layer: int
    num_heads: int
    nope_dim: int  # columns of a query that meet the latent vector
    rope: Rope  # of all its other columns
    rank: int  # numbers of a latent vector
    value_dim: int  # columns of a head's result
    scale: float
    kv_norm: Vector  # by which the latent vector is normed
    norm_eps: float
    turns_neighbours: bool  # rope's pairs are (2 i, 2 i + 1)
    window: int | None = None

    @property
    def rope_dim(self) -> int:
        return 2 * len(self.rope.inv_freq)


@dataclass(frozen=True, slots=True, eq=False)
class ConvSpec:
    """A causal convolution of each column by itself, over its last `kernel` inputs."""

    layer: int  # index into the caches: a StateSpec
    kernel: int
    weight: Vector  # [columns, 1, kernel], the last for the token itself
    bias: Vector | None = None
    activation: Activation | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SsdSpec:
    """A scan as in Mamba 2. Heads share B and C in groups."""

    layer: int
    offset: int  # of its state in the layer's, in values
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    a_log: Vector  # [heads], these three
    d: Vector
    dt_bias: Vector
    dt_min: float = 0.0
    dt_max: float = float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveSpec:
    """A scan as in Mamba 1: each column has a state of its own."""

    layer: int
    offset: int  # of its state in the layer's, in values
    width: int
    state_size: int
    a_log: Vector  # [width, state_size]
    d: Vector  # [width], as the next
    dt_bias: Vector


@dataclass(frozen=True, slots=True, eq=False)
class DeltaSpec:
    """A gated delta rule. A key head serves `num_value_heads / num_key_heads` value heads."""

    layer: int
    offset: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    a_log: Vector  # [value heads], both
    dt_bias: Vector


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
    """How a token's experts are chosen and weighed: by a softmax of its scores, or the sigmoid of
    each."""

    top_k: int
    renormalise: bool  # weights are shares among the chosen experts, not among all
    activation: Activation
    is_sigmoid: bool = False
    bias: Vector | None = None  # of each expert: counts in the choice, not in its weight
    # Experts are chosen from the best `top_groups` of their groups: those whose best score, or best
    # two together, are highest.
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0  # of the weights
    weighs_inputs: bool = False  # weights multiply what an expert takes, not what it gives


# What models keep. The rows that become logits, as the output head takes them:
HIDDEN = "hidden"
# What a head that drafts is to go on from, of the rows that become logits:
STATE = "state"


def cross_queries(layer: int) -> str:
    """The name by which a decoder keeps what a layer attends to its audio with."""
    return f"cross queries of layer {layer}"


def layer_output(index: int) -> str:
    """Under what name a model keeps the rows behind a layer: where it may be cut into stages."""
    return f"layer.{index}"


class Loader(Protocol):
    """Hands out weights by name and keeps account of which were taken.

    Raises ModelError at once on a wrong shape; missing names are collected, so that one error lists
    them all (`finish`).
    """

    def embedding(self, name: str, rows: int, columns: int) -> Embedding:
        """The table `name`.weight."""

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> Linear:
        """The weights `names`.weight stacked along their outputs, and `names`.bias if any."""

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> Experts:
        """For each expert the weights of its `names`, stacked along their outputs, and their biases
        if any."""

    def tied(self, embedding: Embedding) -> Linear:
        """The embedding table as the language model's head; shares its memory."""

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Vector:
        """The vector `name` plus `offset`, in float32; `name` is whole, ending and all."""


class RecurrentLoader(Loader, Protocol):
    """What models with recurrent states load besides."""

    def array(self, name: str, shape: tuple[int, ...]) -> Vector:
        """As `vector`, of any shape."""


class Ops(Protocol):
    """What a model is composed of."""

    def embedding(self, table: Embedding, *, scale: float = 1.0) -> Value:
        """The step's token ids looked up in `table`, times scale: [T, hidden]. Of placeholders of
        pictures the pictures' rows instead, as they are."""

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

    def add_picture_rows(self, x: Value, index: int) -> Value:
        """x, and at placeholders of pictures more of their rows' columns, of which each x has as
        many: those of `index` 0 are what `embedding` gave."""

    def keep(self, name: str, x: Value) -> Value:
        """x itself, which a backend that wants what has this name can read behind the step."""


class EncoderOps(Ops, Protocol):
    """What models that read whole texts and generate nothing are composed of besides."""

    def encoder_attention(self, qkv: Value, spec: AttentionSpec) -> Value:
        """As `attention`, over texts that are whole in the step; nothing is kept. Unless causal, a
        window goes both ways."""

    def pool(self, x: Value, how: Pool) -> Value:
        """One row for each text from its tokens' rows: [S, columns]. The k-th of them weighs k in
        a weightedmean."""


class ShiftOps(EncoderOps, Protocol):
    """What encoders of audio are composed of besides."""

    def shift_rows(self, x: Value) -> Value:
        """The row before each one, zeros for a sequence's first: [T, columns]."""


class CrossOps(ShiftOps, Protocol):
    """What models with an encoder and a decoder are composed of besides. The encoder's pass has
    features instead of token ids; the decoder's reads what it stored."""

    def features(self, columns: int) -> Value:
        """The step's features: [T, columns]."""

    def store_cross(self, kv: Value, spec: CrossSpec) -> None:
        """Keep the keys and values of columns [k heads | v heads] in the sequence's slot."""

    def cross_attention(self, q: Value, spec: CrossSpec) -> Value:
        """Attend from columns [q heads] to all that is kept in the sequence's slot, whatever the
        token's position: [T, num_heads * head_dim]."""


class RecurrentOps(Ops, Protocol):
    """What models with recurrent states are composed of besides. A state is read where a sequence
    stands before the step, and left where it stands behind it."""

    def columns(self, x: Value, first: int, count: int) -> Value:
        """Columns [first, first + count) of x."""

    def join(self, x: Value, y: Value) -> Value:
        """Columns [x | y]."""

    def multiply(self, x: Value, y: Value, activation: Activation | None = None) -> Value:
        """x * activation(y), element by element."""

    def group_norm(self, x: Value, weight: Vector, eps: float, size: int) -> Value:
        """An RMS norm of each `size` columns; the weight is of all columns, or of `size`."""

    def short_conv(self, x: Value, spec: ConvSpec) -> Value:
        """activation(bias + Σ weight · the last inputs): [T, columns]."""

    def ssd_scan(self, xbc: Value, dt: Value, spec: SsdSpec) -> Value:
        """Columns [heads of x | groups of B | groups of C], and dt before bias and softplus:
        state = exp(-exp(a_log) dt) state + dt B x, C · state + d x: [T, heads * head_dim]."""

    def selective_scan(self, x: Value, dt: Value, b: Value, c: Value, spec: SelectiveSpec) -> Value:
        """dt before bias and softplus: state = exp(-exp(a_log) dt) state + dt x B,
        C · state + d x: [T, width]."""

    def delta_rule(self, qkv: Value, gates: Value, spec: DeltaSpec) -> Value:
        """Columns [q | k | v] and [beta | dt], all before their norms and gates: the state decays
        by exp(-exp(a_log) dt), and its answer to k is moved towards v by sigmoid(beta); q asks
        it then: [T, value heads * value_dim]."""


class StreamOps(RecurrentOps, Protocol):
    """What models are composed of besides whose residual is several streams side by side."""

    def mix(self, x: Value, weights: Value, num_inputs: int, *, offset: float = 0.0) -> Value:
        """Streams that are each a sum of the `num_inputs` streams in x, by weights + offset: for
        each stream of the result one for each of x."""

    def match_rms(self, x: Value, like: Value, floor: float) -> Value:
        """x * sqrt(mean(like²) / max(mean(x²), floor)), row by row."""

    def sparsify(self, x: Value, deviations: float) -> Value:
        """relu(x - (mean(x) + deviations * standard deviation(x))), row by row."""

    def scale_columns(self, x: Value, factors: Vector) -> Value:
        """x * factors, column by column."""


class LatentLoader(Loader, Protocol):
    """What models of latent attention take besides."""

    def latent_heads(
        self, name: str, num_heads: int, nope_dim: int, value_dim: int, rank: int
    ) -> tuple[Heads, Heads]:
        """`name`.weight, [heads * (nope_dim + value_dim), rank], as what brings each head's queries
        into latent space, [rank, nope_dim], and its sums back, [value_dim, rank]."""


class LatentOps(Ops, Protocol):
    """What models of latent attention are composed of besides."""

    def latent_attention(
        self, q: Value, kv: Value, key_up: Heads, value_up: Heads, spec: LatentAttentionSpec
    ) -> Value:
        """Cache kv, [latent | rope] columns, its first part normed and its second turned; attend
        with q, [heads * (nope | rope)] columns: [T, num_heads * value_dim]."""


class InputOps(Protocol):
    """What takes rows from outside."""

    def input(self, columns: int, *, first: int = 0) -> Value:
        """Rows that the step brings, from their column `first` on: [T, columns]. Embeddings are
        those of the tokens then."""


class VisionOps(ShiftOps, InputOps, Protocol):
    """What towers are composed of."""


class DraftOps(Ops, InputOps, Protocol):
    """What heads that draft are composed of."""


class Model(Protocol):
    """A model family: weights taken from a loader, and one forward pass over ops."""

    def forward(self, ops: Ops) -> Value:
        """The logits of the selected rows: [S, vocabulary]."""


class EncoderDecoder(Model, Protocol):
    """A model whose requests bring features, which an encoder reads first."""

    def encode(self, ops: CrossOps) -> Value:
        """Store what the decoder's layers attend to. Returns the encoder's last hidden states."""
