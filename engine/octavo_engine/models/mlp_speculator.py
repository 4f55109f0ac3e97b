"""IBM's MLP speculator: a chain of heads, each over the state of the one before and the token that
was drafted last.

state ── linear ──(+)── norm ── gelu ──┬── linear ── logits
token ── embedding ┘                   └── state of the next head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.models.fields import ConfigFields
from octavo_engine.ops import STATE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.ops import DraftOps, Loader, Value

NORM_EPS = 1e-6
MAX_HEADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpeculatorConfig:
    """What config.json says of a speculator."""

    hidden_size: int
    vocab_size: int
    inner_size: int
    num_heads: int
    shares_weights: bool  # all heads have the same, but for the first one's projection
    scales_input: bool

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> MlpSpeculatorConfig:
        """Raises ModelError that names the field."""
        fields = ConfigFields(values, defaults={"n_predict": 3, "inner_dim": 0})
        hidden_size = fields.integer("emb_dim", maximum=1 << 17)
        return cls(
            hidden_size=hidden_size,
            vocab_size=fields.integer("vocab_size", maximum=1 << 24),
            inner_size=fields.integer("inner_dim", minimum=0, maximum=1 << 17) or hidden_size,
            num_heads=fields.integer("n_predict", maximum=MAX_HEADS),
            shares_weights=fields.boolean("tie_weights"),
            scales_input=fields.boolean("scale_input"),
        )

    @property
    def token_weight(self) -> float:
        """Of a token's embedding, to the state."""
        state: float = 0.5 ** (0.5 / self.num_heads)
        token: float = ((1 - state**2) * self.inner_size / 2) ** 0.5
        return token / state

    def place(self, head: int) -> int:
        """Which of the stored heads has its embedding, norm and output."""
        return 0 if self.shares_weights else head

    def projection(self, head: int) -> int:
        """And which its projection: those of a state of the model and of a head are two."""
        return min(head, 1) if self.shares_weights else head


class MlpSpeculator:
    """The first heads of a speculator."""

    def __init__(self, config: MlpSpeculatorConfig, loader: Loader, num_heads: int) -> None:
        self.config = config
        self.num_heads = num_heads
        size, vocab = config.inner_size, config.vocab_size
        places = sorted({config.place(head) for head in range(num_heads)})
        self._embeddings = [loader.embedding(f"emb.{place}", vocab, size) for place in places]
        self._norms = [loader.vector(f"ln.{place}.weight", size) for place in places]
        # A table of one row, which every position looks up.
        self._biases = [loader.embedding(f"ln.{place}.bias_row", 1, size) for place in places]
        self._outputs = [loader.linear(f"head.{place}", size, vocab) for place in places]
        self._projections = [
            loader.linear(f"proj.{index}", size if index else config.hidden_size, size)
            for index in sorted({config.projection(head) for head in range(num_heads)})
        ]
        self._input_norm = None
        if config.scales_input:
            self._input_norm = loader.vector("ln0.weight", config.hidden_size)

    def forward(self, ops: DraftOps, head: int) -> Value:
        """One head's logits of states that the step brings, and the tokens behind them."""
        place = self.config.place(head)
        x = ops.input(self.config.inner_size if head else self.config.hidden_size)
        if head == 0 and self._input_norm is not None:
            x = ops.rms_norm(x, self._input_norm, NORM_EPS)
        x = ops.linear(x, self._projections[self.config.projection(head)])
        token = ops.embedding(self._embeddings[place])
        x = ops.add(x, token, scale=self.config.token_weight)
        x = ops.rms_norm(x, self._norms[place], NORM_EPS)
        x = ops.activation(ops.add(x, ops.table(self._biases[place], "positions")), "gelu")
        return ops.linear(ops.keep(STATE, x), self._outputs[place])
