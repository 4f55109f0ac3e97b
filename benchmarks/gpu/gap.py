"""What the device waits for: whole engine steps, scheduler and all, launched ahead and not; and
steps with parts of prompts, captured and not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.measure.device_limits import median_ms
from octavo_engine.config import SchedulerConfig
from octavo_engine.core.engine import Engine
from octavo_engine.model_runner.runner import ModelRunner
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.random_model import Bench
    from octavo_engine.executor.executor import UnderWay
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import StepResult

NUM_STEPS = 40
WARM_STEPS = 4  # launched, captured, replayed


class Prepared:
    """An executor over a backend that is prepared already, and stays so."""

    def __init__(self, bench: Bench, config: SchedulerConfig) -> None:
        self._runner = ModelRunner(bench.backend, scheduler_config=config, limits=bench.limits)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self._runner.execute(batch)

    def launch(self, batch: ScheduledBatch) -> UnderWay:
        return self._runner.launch(batch)

    def land(self, under_way: UnderWay) -> StepResult:
        return self._runner.land(under_way)

    def poison_blocks(self, block_ids: list[int]) -> None:
        raise NotImplementedError("blocks are real here")

    def close(self) -> None:
        pass


def steps(
    bench: Bench,
    num_seqs: int,
    context: int,
    *,
    device_ms: Callable[[], float],
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """Milliseconds of a decode step and the share of them in which the device has nothing to do.
    `device_ms` is how long the step itself takes there, requested once it is captured."""
    found: dict[str, Any] = {}
    for name, is_ahead, wishes in (
        ("waiting", False, {}), ("ahead", True, {}),
        ("ahead_penalised", True, {"repetition_penalty": 1.1}),
    ):  # fmt: skip
        found[f"{name}_step_ms"] = _step_ms(
            bench, num_seqs, context, num_steps, is_ahead=is_ahead, wishes=wishes
        )
    # What penalties cost the device is not in it: their steps have no share.
    found["device_ms"] = device_ms()
    for name in ("waiting", "ahead"):
        found[f"{name}_gap_share"] = 1 - found["device_ms"] / found[f"{name}_step_ms"]
    return found


def mixed(bench: Bench, num_decodes: int, num_prompt_tokens: int) -> dict[str, Any]:
    """A small step of both kinds, by a graph and launch by launch."""
    start = min(256, bench.limits.max_model_len // 2)
    step = bench.step([start] * num_decodes + [0], [1] * num_decodes + [num_prompt_tokens])
    sampling = bench.sampling(step)
    found: dict[str, Any] = {}
    captures = bench.backend._use_graphs
    for name, use_graphs in (("captured", captures), ("launched", False)):
        bench.backend._use_graphs = use_graphs
        bench.backend.execute(step, sampling)
        found[f"{name}_ms"] = median_ms(lambda: bench.backend.execute(step, sampling), repeats=10)
    bench.backend._use_graphs = captures
    return found


def _step_ms(
    bench: Bench,
    num_seqs: int,
    context: int,
    num_steps: int,
    *,
    is_ahead: bool,
    wishes: dict[str, float],
) -> float:
    limits = bench.limits
    config = SchedulerConfig(
        max_num_seqs=limits.max_seqs,
        max_num_batched_tokens=limits.max_tokens,
        max_model_len=limits.max_model_len,
    )
    executor = Prepared(bench, config)
    scheduler = Scheduler(config, num_blocks=bench.num_blocks)
    engine = Engine(scheduler, executor, launches=executor if is_ahead else None)
    rng = np.random.default_rng(0)
    # As many as are admitted together: without a limit each might grow to the full length.
    longest = NUM_STEPS + WARM_STEPS + 64
    params = SamplingParams(max_tokens=longest, temperature=0.0, ignore_eos=True, **wishes)  # type: ignore[arg-type]  # floats all
    for number in range(num_seqs):
        prompt = rng.integers(0, bench.backend.vocab_size, context).tolist()
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    seen: set[str] = set()
    while len(seen) < num_seqs:
        seen.update(output.request_id for output in engine.step().outputs)
    for _ in range(WARM_STEPS):
        engine.step()
    started = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    step_ms = (time.perf_counter() - started) * 1e3 / num_steps
    assert len(scheduler.running) == num_seqs, "a sequence ended, or found no memory"
    for number in range(num_seqs):
        engine.abort(str(number))
    while engine.has_work:
        engine.step()
    return step_ms
