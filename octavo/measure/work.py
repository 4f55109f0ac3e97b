"""How much a step has to read and to multiply, and so how fast it could be at best. Pure.

The limit is the roofline's: a step takes as long as the slower of reading its bytes and multiplying
its numbers, both at the machine's best.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from octavo_engine.backends.native.packing import choose_packing
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.registry import build_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.measure.limits import Limits
    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.source import ModelFiles

BITS = {"f32": 32.0, "bf16": 16.0, "q8": 8.5, "q4": 5.0}  # of a weight, scales included
PEAK_OF = {"f32": "float32", "bf16": "bf16", "q8": "int8", "q4": "int8"}


@dataclass(frozen=True, slots=True)
class Step:
    """What is computed at once."""

    num_tokens: int
    num_logit_rows: int
    num_kv_tokens: int  # cached tokens that are read
    num_pairs: int  # of a token and a token that it sees

    @classmethod
    def decode(cls, num_sequences: int, context: int) -> Step:
        """One more token for each; `context` tokens seen by each, itself included."""
        seen = num_sequences * context
        return cls(num_sequences, num_sequences, seen, seen)

    @classmethod
    def prefill(cls, length: int) -> Step:
        """One prompt, whole."""
        return cls(length, 1, length, length * (length + 1) // 2)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model's sizes, as far as they cost time."""

    body_weights: int  # used for every token
    head_weights: int  # used where logits are wanted
    body_packing: str  # f32, bf16, q8 or q4
    head_packing: str
    kv_bytes_per_token: float
    attention_flop_per_pair: int

    @classmethod
    def of(cls, config: EngineConfig, files: ModelFiles, *, kv_bytes_per_token: float) -> ModelWork:
        model = ModelConfig.from_hf(files.config)
        counter = _Counter()
        build_model(model, counter, 16)
        dtype: Dtype = "f32" if config.dtype == "float32" else "bf16"
        body_types, head_types = _stored_types(config, files)
        return cls(
            body_weights=counter.body,
            head_weights=counter.head,
            body_packing=choose_packing(
                body_types, dtype, config.quantization, is_vocabulary=False
            ),
            head_packing=choose_packing(head_types, dtype, config.quantization, is_vocabulary=True),
            kv_bytes_per_token=kv_bytes_per_token,
            attention_flop_per_pair=4 * model.num_layers * model.num_heads * model.head_dim,
        )

    @property
    def form(self) -> str:
        """Of most weights, as people say it."""
        return {"f32": "float32", "bf16": "bf16", "q8": "8-bit", "q4": "4-bit"}[self.body_packing]

    @property
    def weight_bytes(self) -> float:
        body = self.body_weights * BITS[self.body_packing]
        return (body + self.head_weights * BITS[self.head_packing]) / 8

    def num_bytes(self, step: Step) -> float:
        """That have to come from memory: weights once for all tokens, the cache for each."""
        return self.weight_bytes + step.num_kv_tokens * self.kv_bytes_per_token

    def num_flop(self, step: Step) -> float:
        products = self.body_weights * step.num_tokens + self.head_weights * step.num_logit_rows
        return 2.0 * products + self.attention_flop_per_pair * step.num_pairs

    def peak(self, limits: Limits) -> float:
        """FLOP/s of the type that weights are multiplied in; infinite where it is not known."""
        return limits.gemm_gflop_s.get(PEAK_OF[self.body_packing], inf) * 1e9

    def best_s(self, step: Step, limits: Limits) -> float:
        reading_s = self.num_bytes(step) / (limits.read_gb_s * 1e9)
        return max(reading_s, self.num_flop(step) / self.peak(limits))

    def bound(self, step: Step, limits: Limits) -> str:
        """What sets the limit."""
        reading_s = self.num_bytes(step) / (limits.read_gb_s * 1e9)
        is_reading = reading_s >= self.num_flop(step) / self.peak(limits)
        return "read bandwidth" if is_reading else f"{PEAK_OF[self.body_packing]} GEMM peak"


class _Counter:
    """A loader that loads nothing: it counts the weights that each token is multiplied with."""

    def __init__(self) -> None:
        self.body = 0
        self.head = 0

    def embedding(self, name: str, rows: int, columns: int) -> Any:
        return rows * columns

    def linear(
        self,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        *,
        bias: bool = False,
    ) -> Any:
        rows = out_features if isinstance(out_features, int) else sum(out_features)
        if names == "lm_head" or list(names) == ["lm_head"]:
            self.head += rows * in_features
        else:
            self.body += rows * in_features

    def tied(self, embedding: Any) -> Any:
        self.head += embedding

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Any:
        return None


def _stored_types(config: EngineConfig, files: ModelFiles) -> tuple[set[str], set[str]]:
    """Of the layers' matrices, and of the head."""
    if config.load_format == "dummy":
        return {"BF16"}, {"BF16"}
    if files.gguf is not None:
        matrices = [t for t in files.gguf.tensors.values() if len(t.shape) == 2]
        head = {t.type for t in matrices if t.name in ("token_embd.weight", "output.weight")}
        return {t.type for t in matrices if t.name.startswith("blk.")}, head
    bits = _integer_bits(files.config.get("quantization_config"))
    return {{8: "Q8_0", 4: "Q4_1"}.get(bits, "BF16")}, {"BF16"}


def _integer_bits(quantization: Any) -> int:
    """Of a checkpoint that is quantised already; 0 of one that is not."""
    if not isinstance(quantization, dict):
        return 0
    if isinstance(bits := quantization.get("bits"), int):
        return bits
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(bits := (group.get("weights") or {}).get("num_bits"), int):
            return bits
    return 0
