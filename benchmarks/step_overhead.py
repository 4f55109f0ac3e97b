"""What Python costs per step: scheduler, runner and result handling; the backend does nothing.

    python -m benchmarks.step_overhead [--json] [--sequences 1 64 256] [--steps 400]

Every sequence decodes one token a step, new blocks included. The budget is 200 µs at 64 sequences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.caches import KVSpec, one_group
from octavo_engine.config import SchedulerConfig
from octavo_engine.executor.uni import UniExecutor
from octavo_engine.sampling.batch import Sampled
from octavo_engine.scheduling.scheduler import SPARE_LOGITS, Scheduler
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.sampling.batch import SamplingBatch

PROMPT_TOKENS = 32
WARM_UP_STEPS = 50


class NullBackend:
    """Answers every row with the same token, at no cost."""

    name = "null"
    vocab_size = 32000
    kv_bytes_per_block = 1
    cache_layout = one_group([KVSpec(num_kv_heads=1, head_dim=1)])

    def kv_memory(self, limits: BackendLimits, fraction: float | None) -> int | None:
        return None

    def prepare(self, limits: BackendLimits, num_blocks: int) -> None:
        self.tokens = np.full(limits.max_logit_rows, 7, np.int32)
        self.status = np.zeros(limits.max_logit_rows, np.uint8)

    def execute(self, step: BackendStep, sampling: SamplingBatch) -> Sampled:
        num_rows = len(step.logit_rows)
        return Sampled(self.tokens[:num_rows], self.status[:num_rows])

    def poison_blocks(self, block_ids: list[int]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Overhead:
    """Microseconds per step."""

    num_sequences: int
    schedule_us: float
    execute_us: float
    update_us: float
    total_us: float  # median of the sums
    p99_us: float


def measure(num_sequences: int, num_steps: int) -> Overhead:
    max_model_len = PROMPT_TOKENS + WARM_UP_STEPS + num_steps + 16
    config = SchedulerConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(2048, num_sequences * PROMPT_TOKENS),
        max_model_len=max_model_len,
        enable_prefix_caching=True,
    )
    limits = BackendLimits(
        max_tokens=config.max_num_batched_tokens,
        max_seqs=num_sequences,
        max_logit_rows=num_sequences + SPARE_LOGITS,
        max_model_len=max_model_len,
    )
    num_blocks = num_sequences * (max_model_len // 16 + 2)
    scheduler = Scheduler(config, num_blocks=num_blocks)
    executor = UniExecutor(
        NullBackend(), scheduler_config=config, limits=limits, num_blocks=num_blocks
    )
    for number in range(num_sequences):
        scheduler.add(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[number + 1, *range(1, PROMPT_TOKENS)],
                params=SamplingParams(max_tokens=None, ignore_eos=True),
            )
        )
    times: list[tuple[float, float, float]] = []
    while len(times) < WARM_UP_STEPS + num_steps:
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        result = executor.execute(batch)
        executed = time.perf_counter()
        scheduler.update(batch, result, executed - start)
        end = time.perf_counter()
        if batch.num_tokens == num_sequences:  # all of them decode
            times.append((scheduled - start, executed - scheduled, end - executed))
    times = times[WARM_UP_STEPS:]
    totals = sorted(sum(parts) for parts in times)
    schedule_s, execute_s, update_s = (statistics.median(part) for part in zip(*times, strict=True))
    return Overhead(
        num_sequences,
        schedule_us=schedule_s * 1e6,
        execute_us=execute_s * 1e6,
        update_us=update_s * 1e6,
        total_us=statistics.median(totals) * 1e6,
        p99_us=totals[len(totals) * 99 // 100] * 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    args = parser.parse_args()
    results = [measure(count, args.steps) for count in args.sequences]
    if args.json:
        fields = ("num_sequences", "schedule_us", "execute_us", "update_us", "total_us", "p99_us")
        print(json.dumps([{f: round(getattr(r, f), 1) for f in fields} for r in results]))
        return
    print(f"{'sequences':>9} {'schedule':>9} {'run':>9} {'update':>9} {'total':>9} {'p99':>9}  µs")
    for r in results:
        parts = (r.schedule_us, r.execute_us, r.update_us, r.total_us, r.p99_us)
        print(f"{r.num_sequences:>9} " + " ".join(f"{part:>9.1f}" for part in parts))


if __name__ == "__main__":
    main()
