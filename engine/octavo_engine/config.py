"""The engine's settings: one frozen tree, validated whole, read once at start."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from octavo_engine.errors import ConfigError

BLOCK_SIZE = (
    16  # tokens per KV block: a sheet folded into sixteen pages; the kernels' panel width too
)

Device = Literal["auto", "cpu", "torch", "sim"]
DType = Literal["auto", "bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a step is filled."""

    max_num_seqs: int = 128  # sequences that may run at once
    max_num_batched_tokens: int = 2048  # tokens in one step
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_queue: int = 1024  # waiting sequences before new ones are refused (503)
    max_step_ms: float = (
        200.0  # a step with prefill is cut to about this long while others are decoding
    )
    max_model_len: int = 2048  # tokens in one sequence, prompt and output together
    enable_prefix_caching: bool = True
    aging_s: float = 5.0  # how long a waiting request may be passed by smaller ones


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The simulator's model of a forward pass."""

    step_base_ms: float = 2.0  # every step
    decode_token_ms: float = 0.05  # each token of a sequence that was caught up
    prefill_token_ms: float = 0.1  # each prompt token
    kv_blocks: int = 4096  # size of the pool
    vocab_size: int = 512
    time_scale: float = 1.0  # < 1 runs faster than real time


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What `octavo serve` and `LLM` were asked for. `auto` and None are settled when the model is known."""

    model: str = "demo://smollm2"  # folder, .gguf, hf://ORG/NAME[@REV], ORG/NAME, demo://NAME
    tokenizer: str | None = None  # folder or file; default: the model's own
    served_model_names: tuple[str, ...] = ()  # default: the model reference as given
    revision: str | None = None  # of a hub model
    device: Device = "auto"
    dtype: DType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights of the right shapes
    max_model_len: int | None = None  # default: the model's own, cut to what the KV pool holds
    kv_cache_memory_bytes: int | None = (
        None  # default: a share of the memory that is free after loading
    )
    memory_fraction: float = 0.5  # of the memory free after loading, for KV, when no size is given
    num_threads: int | None = None  # default: the cores this process may use
    seed: int = 0  # of requests that give none
    chat_template: str | None = None  # file or template text that replaces the model's own
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    sim: SimConfig = field(default_factory=SimConfig)

    def __post_init__(self) -> None:
        s = self.scheduler
        _check(s.max_num_seqs >= 1, "--max-num-seqs must be at least 1", s.max_num_seqs)
        _check(s.max_num_batched_tokens >= 1, "--max-num-batched-tokens must be at least 1",
               s.max_num_batched_tokens)  # fmt: skip
        _check(s.max_queue >= 1, "--max-queue must be at least 1", s.max_queue)
        _check(s.max_step_ms > 0, "--max-step-ms must be above 0", s.max_step_ms)
        _check(self.max_model_len is None or self.max_model_len >= 1,
               "--max-model-len must be at least 1", self.max_model_len)  # fmt: skip
        _check(self.num_threads is None or self.num_threads >= 1,
               "--num-threads must be at least 1", self.num_threads)  # fmt: skip
        _check(0 < self.memory_fraction <= 1 and math.isfinite(self.memory_fraction),
               "--memory-fraction must be above 0 and at most 1", self.memory_fraction)  # fmt: skip
        _check(self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0,
               "--kv-cache-memory-bytes must be above 0", self.kv_cache_memory_bytes)  # fmt: skip

    def replace(self, **changes: object) -> EngineConfig:
        """The same settings with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # checked by the caller

    @property
    def names(self) -> tuple[str, ...]:
        """The names this model answers to; the first one is reported."""
        return self.served_model_names or (self.model,)


def _check(ok: bool, rule: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"{rule}; got {got}")
