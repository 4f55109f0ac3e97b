"""Medusa's heads: each guesses one of the tokens that follow, from the last hidden state.

hidden ── linear ── silu ──(+)── … ── linear ── logits of the head's place
      └─────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.models.fields import ConfigFields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.ops import DraftOps, Loader, Value

MAX_HEADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """What config.json says of a set of heads, under vLLM's names."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int  # of a head, before its last
    num_tokens: int  # that a head has logits for
    has_bias: bool
    shares_output: bool  # one last matrix for all heads
    logits_scale: float

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> MedusaConfig:
        """Raises ModelError that names the field."""
        own = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
        fields = ConfigFields(
            values,
            aliases=own,
            defaults={"num_heads": 5, "num_hidden_layers": 1},
        )
        vocab_size = fields.integer("vocab_size", maximum=1 << 24)
        num_tokens = fields.optional_integer("truncated_vocab_size", maximum=vocab_size)
        scale = fields.optional_positive("logit_scale")
        return cls(
            hidden_size=fields.integer("hidden_size", maximum=1 << 17),
            vocab_size=vocab_size,
            num_heads=fields.integer("num_heads", maximum=MAX_HEADS),
            num_layers=fields.integer("num_hidden_layers", minimum=0, maximum=64),
            num_tokens=num_tokens or vocab_size,
            has_bias=fields.boolean("medusa_fc_bias"),
            shares_output=fields.boolean("original_lm_head"),
            logits_scale=1.0 if scale is None else scale,
        )


class MedusaHeads:
    """The first heads of a set."""

    def __init__(self, config: MedusaConfig, loader: Loader, num_heads: int) -> None:
        self.config = config
        size = config.hidden_size
        self._blocks = [
            [
                loader.linear(f"blocks.{head}.layers.{layer}", size, size, bias=config.has_bias)
                for layer in range(config.num_layers)
            ]
            for head in range(num_heads)
        ]
        names = ["lm_head"] if config.shares_output else [f"lm_heads.{i}" for i in range(num_heads)]
        self._outputs = [loader.linear(name, size, config.num_tokens) for name in names]

    @property
    def num_heads(self) -> int:
        return len(self._blocks)

    def forward(self, ops: DraftOps, head: int) -> Value:
        """One head's logits of hidden states that the step brings."""
        x = ops.input(self.config.hidden_size)
        for layer in self._blocks[head]:
            x = ops.add(x, ops.activation(ops.linear(x, layer), "silu"))
        logits = ops.linear(x, self._outputs[0 if self.config.shares_output else head])
        scale = self.config.logits_scale
        return logits if scale == 1.0 else ops.scale(logits, scale)
