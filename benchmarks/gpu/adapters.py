"""Decode with LoRA adapters beside the bytes that they add, and steps while one is on its way."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.measure.device_limits import median_ms
from octavo_engine.backends.adapters import AdapterLimits, SitePart
from octavo_engine.backends.torch.device_adapters import HostAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from benchmarks.gpu.measure import Ceilings
    from benchmarks.gpu.random_model import Bench
    from octavo_engine.backends.adapters import AdapterSite
    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.sampling.batch import SamplingBatch

RANK = 16
COUNTS = (0, 1, 8, 64)  # adapters in a step
CONTEXT = 256
NUM_STEPS, NUM_WARM = 20, 4


def decode(
    bench: Bench,
    ceilings: Ceilings,
    *,
    num_seqs: int = 64,
    counts: Sequence[int] = COUNTS,
    num_steps: int = NUM_STEPS,
) -> dict[str, Any]:
    """A token for each of so many sequences, as a server makes them; of all linear layers."""
    backend = bench.backend
    backend.release_kv()
    backend.use_adapters(AdapterLimits(max(counts), RANK), bench.sites)
    backend.prepare(bench.limits, bench.num_blocks)
    assert backend._adapters is not None
    first = backend._adapters.pack_parts(random_parts(bench.sites))
    start = time.perf_counter()
    for slot in range(max(counts)):
        backend.set_adapter(slot, HostAdapter(first.data))
    bench.fill(num_seqs, CONTEXT)
    found: dict[str, Any] = {"adapter_mb": len(first.data) / 1e6}
    position, base_ms = CONTEXT, 0.0
    for count in counts:
        step, sampling = _step(bench, num_seqs, position, count)
        for _ in range(NUM_WARM):  # launched, captured, and warm by then
            backend.execute(step, sampling)
        if count == max(counts):  # all have arrived
            found["all_there_after_s"] = time.perf_counter() - start
        step_ms = _median_ms(lambda s=step, p=sampling: backend.execute(s, p), num_steps)  # type: ignore[misc]  # defaults are no annotations
        device_ms = _replayed_ms(bench, step, num_steps)
        found[f"{count}_step_ms"], found[f"{count}_device_ms"] = step_ms, device_ms
        if not count:
            base_ms = device_ms
            continue
        least_ms = count * len(first.data) / ceilings.bytes_per_s * 1e3
        found[f"{count}_added_ms"] = device_ms - base_ms
        found[f"{count}_bytes_ms"] = least_ms
        found[f"{count}_against_base_and_bytes"] = device_ms / (base_ms + least_ms)
    # One that no slot holds is sent while steps go on.
    times: list[float] = []
    start = time.perf_counter()
    backend.expect_adapter(HostAdapter(first.data))
    (upload,) = backend._adapters._uploads.values()
    while not upload.done() or not times:
        times.append(_median_ms(lambda: backend.execute(step, sampling), 1))
    seconds = time.perf_counter() - start
    found["upload_gb_per_s"] = len(first.data) / seconds / 1e9
    found[f"{max(counts)}_step_beside_upload_ms"] = statistics.median(times)
    return found


def random_parts(sites: Sequence[AdapterSite]) -> dict[int, list[SitePart]]:
    """Of every part of every layer; rows and columns are pieces of one row of numbers."""
    rng = np.random.default_rng(0)
    most = RANK * max(max(site.columns, *site.sizes) for site in sites)
    values = rng.normal(0, 0.01, most).astype(np.float32)
    return {
        number: [
            SitePart(
                part,
                values[: RANK * site.columns].reshape(RANK, site.columns),
                values[: RANK * size].reshape(size, RANK),
                0.1,
            )
            for part, size in enumerate(site.sizes)
        ]
        for number, site in enumerate(sites)
    }


def _step(
    bench: Bench, num_seqs: int, position: int, count: int
) -> tuple[BackendStep, SamplingBatch]:
    step = bench.step([position] * num_seqs, [1] * num_seqs)
    if count:
        step.adapters = np.arange(num_seqs, dtype=np.int32) % count
    return step, bench.sampling(step)


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _replayed_ms(bench: Bench, step: BackendStep, repeats: int) -> float:
    """The step's graph alone; where there are none, the step."""
    backend, sampling = bench.backend, bench.sampling(step)
    graphs, key = backend._graphs, _graph_key(bench, step)
    if graphs is None or key is None:
        return _median_ms(lambda: backend.execute(step, sampling), repeats)
    nothing = torch.empty(0)
    return median_ms(lambda: graphs.run(key, lambda: (nothing, nothing)), repeats=repeats)


def _graph_key(bench: Bench, step: BackendStep) -> Hashable | None:
    """Of the last step; None: it was not captured."""
    graphs, num_seqs = bench.backend._graphs, len(step.seq_lens)
    captured = () if graphs is None else graphs.captured
    if step.adapters is None:
        return num_seqs if num_seqs in captured else None
    adapted = (k for k in captured if isinstance(k, tuple) and k[0] is True)
    return next((key for key in adapted if key[1].seqs == num_seqs), None)
