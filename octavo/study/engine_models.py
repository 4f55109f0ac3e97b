"""How the engines of a study compute: how long a step takes, and how much memory there is."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from octavo_engine.backends.sim.backend import step_seconds
from octavo_engine.config import BLOCK_SIZE, SchedulerConfig, SimConfig

USUAL_BATCH = 16  # sequences that decode at once, for estimates of work


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One kind of engine."""

    name: str
    sim: SimConfig
    scheduler: SchedulerConfig

    @property
    def num_kv_tokens(self) -> int:
        return self.sim.kv_blocks * BLOCK_SIZE

    def step_s(self, *, num_decodes: int, num_prefill_tokens: int) -> float:
        return step_seconds(
            self.sim, num_decodes=num_decodes, num_prefill_tokens=num_prefill_tokens
        )

    def work_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """About how long a request occupies an engine beside others."""
        decode_ms = self.sim.decode_token_ms + self.sim.step_base_ms / USUAL_BATCH
        return 1e-3 * (
            num_prompt_tokens * self.sim.prefill_token_ms + num_output_tokens * decode_ms
        )

    def with_blocks(self, num_blocks: int) -> EngineModel:
        """The same with another amount of memory."""
        return _fitted(
            self.name, dataclasses.replace(self.sim, kv_blocks=num_blocks), self.scheduler
        )


def _fitted(name: str, sim: SimConfig, scheduler: SchedulerConfig) -> EngineModel:
    """A sequence may be as long as memory allows."""
    length = sim.kv_blocks * BLOCK_SIZE
    return EngineModel(name, sim, dataclasses.replace(scheduler, max_model_len=length))


def engine_models() -> dict[str, EngineModel]:
    """By name.

    gpu-8b   8 billion weights in bf16 on one accelerator of 80 GB and 3 TB/s: 6 ms to read the
             weights, 25,000 prompt tokens a second, 128 KiB of KV a token
    cpu-sim  `octavo serve --device sim` as it comes
    """
    models = (
        _fitted(
            "gpu-8b",
            SimConfig(
                step_base_ms=6.0, decode_token_ms=0.1, prefill_token_ms=0.04, kv_blocks=26_000
            ),
            SchedulerConfig(
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_queue=8192,
                queue_timeout_s=math.inf,
            ),
        ),
        _fitted("cpu-sim", SimConfig(), SchedulerConfig(queue_timeout_s=math.inf)),
    )
    return {model.name: model for model in models}
