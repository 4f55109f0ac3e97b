"""How much a step has to read and to multiply, and so how fast it could be at best. Pure.

The limit is the roofline's: a step takes as long as the slower of reading its bytes and multiplying
its numbers, both at the machine's best.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from octavo.measure.weight_formats import held_by_cpu, held_by_gpu
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.registry import build_model
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from octavo.measure.machine_limits import MachineLimits
    from octavo.measure.weight_formats import Held
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.ops import ExpertNames, ExpertSizes, Names, Sizes
    from octavo_engine.weights.source import ModelFiles


@dataclass(frozen=True, slots=True)
class WorkStep:
    """What is computed at once."""

    num_tokens: int
    num_logit_rows: int
    num_kv_tokens: int  # cached tokens that are read
    num_pairs: int  # of a token and a token that it sees

    @classmethod
    def decode(cls, num_sequences: int, context: int) -> WorkStep:
        """One more token for each; `context` tokens seen by each, itself included."""
        seen = num_sequences * context
        return cls(num_sequences, num_sequences, seen, seen)

    @classmethod
    def prefill(cls, length: int) -> WorkStep:
        """One prompt, whole."""
        return cls(length, 1, length, length * (length + 1) // 2)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model's sizes, as far as they cost time."""

    body_weights: int  # used for every token
    head_weights: int  # used where logits are wanted
    held: Held
    kv_bytes_per_token: float
    attention_flop_per_pair: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        files: ModelFiles,
        *,
        kv_bytes_per_token: float,
        has_fp8: bool = False,
    ) -> ModelWork:
        """`has_fp8`: the device multiplies FP8, and so keeps it."""
        model = ModelConfig.from_hf(files.config)
        counter = _Counter(model.experts.top_k / model.experts.num_experts if model.experts else 1)
        build_model(model, counter, 16)
        is_gpu = config.device == "cuda"
        held = held_by_gpu(config, files, has_fp8=has_fp8) if is_gpu else held_by_cpu(config, files)
        return cls(
            body_weights=counter.body,
            head_weights=counter.head,
            held=held,
            kv_bytes_per_token=kv_bytes_per_token,
            attention_flop_per_pair=4 * model.num_layers * model.num_heads * model.head_dim,
        )

    @classmethod
    def of_engine(cls, config: EngineConfig, info: ModelInfo, limits: MachineLimits) -> ModelWork:
        """Of a model that is loaded, with the cache as the engine made it."""
        from octavo_engine.core.model_files import resolve

        files = resolve(config)
        assert files is not None  # only the simulator has none
        per_token = info.kv_bytes / info.num_blocks * info.num_cache_groups / BLOCK_SIZE
        has_fp8 = "fp8" in limits.gemm_gflop_s
        return cls.of(config, files, kv_bytes_per_token=per_token, has_fp8=has_fp8)

    @classmethod
    def of_files(cls, config: EngineConfig) -> ModelWork:
        """Of a model that is not loaded, with a cache in bf16."""
        files = resolve_model(config.model)
        model = ModelConfig.from_hf(files.config)
        per_token = 4 * model.num_layers * model.num_kv_heads * model.head_dim
        return cls.of(config, files, kv_bytes_per_token=per_token)

    @property
    def form(self) -> str:
        """Of most weights, as people say it."""
        return self.held.form

    @property
    def weight_bytes(self) -> float:
        body, head = (
            self.body_weights * self.held.body_bits,
            self.head_weights * self.held.head_bits,
        )
        return (body + head) / 8

    def num_bytes(self, step: WorkStep) -> float:
        """That have to come from memory: weights once for all tokens, the cache for each."""
        return self.weight_bytes + step.num_kv_tokens * self.kv_bytes_per_token

    def num_flop(self, step: WorkStep) -> float:
        products = self.body_weights * step.num_tokens + self.head_weights * step.num_logit_rows
        return 2.0 * products + self.attention_flop_per_pair * step.num_pairs

    def peak(self, limits: MachineLimits) -> float:
        """FLOP/s of the type that weights are multiplied in; infinite where it is not known."""
        return limits.gemm_gflop_s.get(self.held.multiplied_in, inf) * 1e9

    def reading_s(self, step: WorkStep, limits: MachineLimits) -> float:
        """How long its bytes take to be read."""
        return self.num_bytes(step) / (limits.read_gb_s * 1e9)

    def multiplying_s(self, step: WorkStep, limits: MachineLimits) -> float:
        """How long its products take; nothing where the peak is not known."""
        return self.num_flop(step) / self.peak(limits)

    def best_s(self, step: WorkStep, limits: MachineLimits) -> float:
        return max(self.reading_s(step, limits), self.multiplying_s(step, limits))

    def bound(self, step: WorkStep, limits: MachineLimits) -> str:
        """What sets the limit."""
        is_reading = self.reading_s(step, limits) >= self.multiplying_s(step, limits)
        return "read bandwidth" if is_reading else f"{self.held.multiplied_in} GEMM peak"


class _Counter:
    """A loader that loads nothing: it counts the weights that each token is multiplied with."""

    def __init__(self, share_of_experts: float) -> None:
        self.body = 0
        self.head = 0
        self._share_of_experts = share_of_experts

    def embedding(self, name: str, rows: int, columns: int) -> Any:
        return rows * columns

    def linear(
        self, names: Names, in_features: int, out_features: Sizes, *, bias: bool = False
    ) -> Any:
        rows = out_features if isinstance(out_features, int) else sum(out_features)
        if names == "lm_head" or list(names) == ["lm_head"]:
            self.head += rows * in_features
        else:
            self.body += rows * in_features

    def experts(
        self, names: ExpertNames, in_features: int, out_features: ExpertSizes, *, bias: bool = False
    ) -> Any:
        self.body += round(len(names) * sum(out_features) * in_features * self._share_of_experts)

    def latent_heads(
        self, name: str, num_heads: int, nope_dim: int, value_dim: int, rank: int
    ) -> Any:
        self.body += num_heads * (nope_dim + value_dim) * rank
        return None, None

    def tied(self, embedding: Any) -> Any:
        self.head += embedding

    def array(self, name: str, shape: tuple[int, ...]) -> Any:
        return None

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> Any:
        return None
