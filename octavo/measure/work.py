"""How much a step has to read and to multiply, and so how fast it could be at best. Pure.

The limit is the roofline's: a step takes as long as the slower of reading its bytes and multiplying
its numbers, both at the machine's best.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from octavo_engine.backends.native.packing import Packing, choose_packings
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.registry import build_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.measure.limits import Limits
    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.config import EngineConfig, Quantization
    from octavo_engine.weights.source import ModelFiles

BITS: dict[Packing, float] = {  # of a weight as the file has it, scales included
    "f32": 32, "bf16": 16, "q8": 8.5, "q4": 5, "q4_0": 4.5, "q5_0": 5.5, "q5_1": 6,
    "q2_k": 2.625, "q3_k": 3.4375, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625,
    "iq4_nl": 4.5, "iq4_xs": 4.25, "mxfp4": 4.25,
}  # fmt: skip


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
    body_packings: dict[Packing, float]  # shares of the weights
    head_packings: dict[Packing, float]
    kv_bytes_per_token: float
    attention_flop_per_pair: int

    @classmethod
    def of(cls, config: EngineConfig, files: ModelFiles, *, kv_bytes_per_token: float) -> ModelWork:
        model = ModelConfig.from_hf(files.config)
        counter = _Counter(model.experts.top_k / model.experts.num_experts if model.experts else 1)
        build_model(model, counter, 16)
        dtype: Dtype = "f32" if config.dtype == "float32" else "bf16"
        body_types, head_types = _stored_types(config, files)
        return cls(
            body_weights=counter.body,
            head_weights=counter.head,
            body_packings=_packings(body_types, dtype, config.quantization, is_vocabulary=False),
            head_packings=_packings(head_types, dtype, config.quantization, is_vocabulary=True),
            kv_bytes_per_token=kv_bytes_per_token,
            attention_flop_per_pair=4 * model.num_layers * model.num_heads * model.head_dim,
        )

    @property
    def form(self) -> str:
        """Of most weights, as people say it."""
        match max(self.body_packings, key=self.body_packings.__getitem__):
            case "f32":
                return "float32"
            case "bf16":
                return "bf16"
            case packing:
                return f"{next(filter(str.isdigit, packing))}-bit"

    @property
    def weight_bytes(self) -> float:
        body, head = _mean_bits(self.body_packings), _mean_bits(self.head_packings)
        return (self.body_weights * body + self.head_weights * head) / 8

    def num_bytes(self, step: Step) -> float:
        """That have to come from memory: weights once for all tokens, the cache for each."""
        return self.weight_bytes + step.num_kv_tokens * self.kv_bytes_per_token

    def num_flop(self, step: Step) -> float:
        products = self.body_weights * step.num_tokens + self.head_weights * step.num_logit_rows
        return 2.0 * products + self.attention_flop_per_pair * step.num_pairs

    def peak(self, limits: Limits) -> float:
        """FLOP/s of the type that weights are multiplied in; infinite where it is not known."""
        return limits.gemm_gflop_s.get(self._multiplied_in, inf) * 1e9

    def best_s(self, step: Step, limits: Limits) -> float:
        reading_s = self.num_bytes(step) / (limits.read_gb_s * 1e9)
        return max(reading_s, self.num_flop(step) / self.peak(limits))

    def bound(self, step: Step, limits: Limits) -> str:
        """What sets the limit."""
        reading_s = self.num_bytes(step) / (limits.read_gb_s * 1e9)
        is_reading = reading_s >= self.num_flop(step) / self.peak(limits)
        return "read bandwidth" if is_reading else f"{self._multiplied_in} GEMM peak"

    @property
    def _multiplied_in(self) -> str:
        return self.form if self.form in ("float32", "bf16") else "int8"


class _Counter:
    """A loader that loads nothing: it counts the weights that each token is multiplied with."""

    def __init__(self, share_of_experts: float) -> None:
        self.body = 0
        self.head = 0
        self._share_of_experts = share_of_experts

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

    def experts(
        self, names: Sequence[Sequence[str]], in_features: int, out_features: Sequence[int]
    ) -> Any:
        self.body += round(len(names) * sum(out_features) * in_features * self._share_of_experts)

    def tied(self, embedding: Any) -> Any:
        self.head += embedding

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Any:
        return None


def _packings(
    types: dict[str, int], dtype: Dtype, quantization: Quantization, *, is_vocabulary: bool
) -> dict[Packing, float]:
    """Which share of the weights is held in which form."""
    shares: dict[Packing, float] = {}
    for stored, count in types.items():
        (packing,) = choose_packings(
            [stored], [count], dtype, quantization, is_vocabulary=is_vocabulary
        )
        shares[packing] = shares.get(packing, 0.0) + count / sum(types.values())
    return shares


def _mean_bits(shares: dict[Packing, float]) -> float:
    return sum(share * BITS[packing] for packing, share in shares.items())


def _stored_types(config: EngineConfig, files: ModelFiles) -> tuple[dict[str, int], dict[str, int]]:
    """Of the layers' matrices, and of the head, with how many weights are of each."""
    if config.load_format == "dummy":
        return {"BF16": 1}, {"BF16": 1}
    if files.gguf is not None:
        body, head = Counter[str](), Counter[str]()
        for tensor in files.gguf.tensors.values():
            if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
                body[tensor.type] += math.prod(tensor.shape)
            elif tensor.name in ("token_embd.weight", "output.weight"):
                head[tensor.type] = math.prod(tensor.shape)
        return body, head
    bits = _integer_bits(files.config.get("quantization_config"))
    return {{8: "Q8_0", 4: "Q4_1"}.get(bits, "BF16"): 1}, {"BF16": 1}


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
