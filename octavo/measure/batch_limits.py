"""Whole batches beside the machine's limits, for benchmarks that time no single step."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.measure.work import ModelWork, WorkStep

if TYPE_CHECKING:
    from octavo.measure.machine_limits import MachineLimits
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import ModelInfo


class Best(NamedTuple):
    """The least that a batch takes."""

    seconds: float  # each step at the slower of the two
    reading_s: float
    multiplying_s: float


def batch_best(
    work: ModelWork,
    limits: MachineLimits,
    *,
    count: int,
    at_once: int,
    input_len: int,
    output_len: int,
) -> Best:
    """Prompts one by one, then steps of `at_once` sequences, each at the machine's limit."""
    num_steps = ceil(count / at_once) * (output_len - 1)
    step = WorkStep.decode(min(count, at_once), input_len + output_len // 2)
    prompt = WorkStep.prefill(input_len)
    return Best(*(
        count * seconds(prompt, limits) + num_steps * seconds(step, limits)
        for seconds in (work.best_s, work.reading_s, work.multiplying_s)
    ))  # fmt: skip


def of_limit(
    limits: MachineLimits | None,
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
    work = ModelWork.of_engine(config, info, limits)
    best = batch_best(
        work, limits, count=count, at_once=config.scheduler.max_num_seqs,
        input_len=input_len, output_len=output_len,
    )  # fmt: skip
    has_peak = work.held.multiplied_in in limits.gemm_gflop_s
    return {
        "machine": limits.describe(),
        "limit_s": best.seconds,
        "percent_of_limit": 100 * best.seconds / elapsed_s,
        "percent_of_bandwidth": 100 * best.reading_s / elapsed_s,
        "percent_of_peak_flops": 100 * best.multiplying_s / elapsed_s if has_peak else None,
    }
