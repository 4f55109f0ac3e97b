"""What it costs to verify drafts: a step of a few tokens for each sequence beside one of a token
each, and whole engine steps with drafts that are always right beside none."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.gap import Prepared
from octavo.measure.device_limits import median_ms
from octavo_engine.backends.torch.programs import MAIN
from octavo_engine.config import SchedulerConfig, SpeculationConfig
from octavo_engine.core.engine import Engine
from octavo_engine.scheduling.scheduler import Scheduler
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.measure import Ceilings
    from benchmarks.gpu.random_model import Bench
    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.sampling.batch import SamplingBatch

NUM_DRAFTS = 4
CONTEXT = 256
LOOP_TOKENS = 64  # of each sequence, before and while the loop is timed


def _median_ms(work: Callable[[], object]) -> float:
    return median_ms(work, repeats=20)


def verify(
    bench: Bench,
    ceilings: Ceilings,
    *,
    sizes: tuple[int, ...] = (1, 16),
    context: int = CONTEXT,
    timer: Callable[[Callable[[], object]], float] = _median_ms,
) -> dict[str, Any]:
    """Milliseconds by sequences, with the share of the bandwidth; tokens/s of whole loops."""
    found: dict[str, Any] = {}
    bench.fill(max(sizes), context)
    for num_seqs in sizes:
        plain = bench.step([context] * num_seqs, [1] * num_seqs)
        step = bench.step([context] * num_seqs, [NUM_DRAFTS + 1] * num_seqs)
        step = dataclasses.replace(step, logit_rows=np.arange(len(step.token_ids), dtype=np.int32))
        for name, each, tokens in (("plain", plain, 1), ("verify", step, NUM_DRAFTS + 1)):
            label = f"{name}_{num_seqs}"
            sampling = sampling_of(bench, each, tokens)
            found |= _times(bench, label, each, sampling, ceilings, context, timer)
        found[f"verify_{num_seqs}_cost"] = (
            found[f"verify_{num_seqs}_ms"] / found[f"plain_{num_seqs}_ms"]
        )
    for num_seqs in sizes:
        rates = [tokens_per_s(bench, num_seqs, context, drafts=drafts) for drafts in (False, True)]
        found[f"loop_{num_seqs}_tokens_per_s"], found[f"loop_{num_seqs}_drafts_tokens_per_s"] = (
            rates
        )
        found[f"loop_{num_seqs}_gain"] = rates[1] / rates[0]
    return found


def sampling_of(bench: Bench, step: BackendStep, tokens: int) -> SamplingBatch:
    """Each of a sequence's rows of logits draws the token at its own position."""
    sampling = bench.sampling(step)
    return dataclasses.replace(
        sampling, rows=np.repeat(step.rows, tokens), positions=step.positions + 1
    )


def _times(
    bench: Bench,
    label: str,
    step: BackendStep,
    sampling: SamplingBatch,
    ceilings: Ceilings,
    context: int,
    timer: Callable[[Callable[[], object]], float],
) -> dict[str, float]:
    """Packing and the tokens' way back included; replayed alone where it is captured."""
    for _ in range(3):  # launched, captured, replayed
        bench.backend.execute(step, sampling)
    found = {f"{label}_ms": timer(lambda: bench.backend.execute(step, sampling))}
    weights = sum(layer.weight.nbytes for layer in bench.linears)
    kv = bench.backend.kv_bytes_per_block / 16 * context * len(step.seq_lens)
    spent = found[f"{label}_ms"]
    graphs = bench.backend._graphs
    key = _graph_of(bench, step)
    if graphs is not None and key in graphs.captured:

        def replay() -> tuple[torch.Tensor, torch.Tensor]:
            return graphs.run(key, lambda: (torch.empty(0), torch.empty(0)))

        spent = found[f"{label}_device_ms"] = timer(replay)
    found[f"{label}_bandwidth_share"] = (weights + kv) / (spent * 1e-3) / ceilings.bytes_per_s
    return found


def _graph_of(bench: Bench, step: BackendStep) -> Any:
    """The key of the step's bucket."""
    backend = bench.backend
    few = backend._few
    if len(step.token_ids) == len(step.seq_lens):
        return next((size for size in backend._buckets.decode if size >= len(step.seq_lens)), None)
    return (MAIN, True, few.sizes(step, backend._kernels)) if few.holds(step) else None


def tokens_per_s(bench: Bench, num_seqs: int, context: int, *, drafts: bool) -> float:
    """Of a loop whose answers are one token again and again, as logits that are all equal give it:
    what followed it before is always right. Scheduler included, not run ahead with drafts."""
    head = next(layer.weight for layer in bench.linears if layer.is_head)
    assert isinstance(head, torch.Tensor)
    kept = head.clone()
    head.zero_()
    try:
        return _loop(bench, num_seqs, context, drafts=drafts)
    finally:
        head.copy_(kept)


def _loop(bench: Bench, num_seqs: int, context: int, *, drafts: bool) -> float:
    limits = bench.limits
    config = SchedulerConfig(
        max_num_seqs=limits.max_seqs,
        max_num_batched_tokens=limits.max_tokens,
        max_model_len=limits.max_model_len,
    )
    speculation = None
    if drafts:
        speculation = SpeculationConfig(num_speculative_tokens=NUM_DRAFTS, prompt_lookup_min=1)
    executor = Prepared(bench, config)
    scheduler = Scheduler(config, num_blocks=bench.num_blocks, speculation=speculation)
    engine = Engine(scheduler, executor, launches=None if drafts else executor)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=2 * LOOP_TOKENS, temperature=0.0, ignore_eos=True)
    for number in range(num_seqs):
        prompt = rng.integers(1, bench.backend.vocab_size, context // 2).tolist()
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    count = 0
    while count < num_seqs * LOOP_TOKENS:  # learns what a row takes, captures its graphs
        count += sum(len(output.token_ids) for output in engine.step().outputs)
    started, count = time.perf_counter(), 0
    while engine.has_work:
        count += sum(len(output.token_ids) for output in engine.step().outputs)
    return count / (time.perf_counter() - started)
