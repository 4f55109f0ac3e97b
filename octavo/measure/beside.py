"""Whole batches beside the machine's limits, for benchmarks that time no single step."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from octavo.measure.limits import Limits, measure_limits
from octavo.measure.work import ModelWork, Step
from octavo_engine.config import BLOCK_SIZE

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import ModelInfo


def limits_for(config: EngineConfig) -> Limits | None:
    """Before the engine is there to share the cores. Of other devices we know no limits."""
    return measure_limits() if config.device in ("auto", "cpu") else None


def batch_best_s(
    work: ModelWork, limits: Limits, *, count: int, at_once: int, input_len: int, output_len: int
) -> float:
    """Prompts one by one, then steps of `at_once` sequences, each at the machine's limit."""
    prompts_s = count * work.best_s(Step.prefill(input_len), limits)
    num_steps = ceil(count / at_once) * (output_len - 1)
    step = Step.decode(min(count, at_once), input_len + output_len // 2)
    return prompts_s + num_steps * work.best_s(step, limits)


def of_limit(
    limits: Limits | None,
    config: EngineConfig,
    info: ModelInfo,
    elapsed_s: float,
    *,
    count: int,
    input_len: int,
    output_len: int,
) -> dict[str, Any]:
    """What to show beside a time; nothing where there are no limits, or the model has no cache."""
    if limits is None or not info.num_blocks:
        return {}
    from octavo_engine.core.build import resolve

    files = resolve(config)
    assert files is not None  # only the simulator has none
    per_token = info.kv_bytes / info.num_blocks / BLOCK_SIZE
    work = ModelWork.of(config, files, kv_bytes_per_token=per_token)
    best_s = batch_best_s(
        work, limits, count=count, at_once=config.scheduler.max_num_seqs,
        input_len=input_len, output_len=output_len,
    )  # fmt: skip
    return {
        "machine": limits.describe(),
        "limit_s": best_s,
        "percent_of_limit": 100 * best_s / elapsed_s,
    }
