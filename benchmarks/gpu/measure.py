"""The numbers of an 8B-shaped model in bf16: decode, prefill, sampling, the gap between steps."""

from __future__ import annotations

import functools
import math
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from octavo.measure.device_limits import median_ms, replayed_ms
from octavo_engine.backends.torch.upload import Uploader

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from benchmarks.gpu.random_model import Bench

UPLOAD_BYTES = 2 << 30


class Ceilings(NamedTuple):
    bytes_per_s: float
    flops_per_s: float


def decode(bench: Bench, num_seqs: int, context: int, ceilings: Ceilings) -> dict[str, Any]:
    """Steps as a server makes them, packing and the tokens' way back included; no scheduler."""
    bench.fill(num_seqs, context)
    sampling_fields: dict[str, Any] = {}
    times, position = [], context
    for index in range(40):
        step = bench.step([position] * num_seqs, [1] * num_seqs)
        sampling = bench.sampling(step, **sampling_fields)
        start = time.perf_counter()
        bench.backend.execute(step, sampling)
        if index >= 8:  # launched, captured, and warm by then
            times.append((time.perf_counter() - start) * 1e3)
        position += 1
    step_ms = statistics.median(times)
    device_ms = graph_ms(bench, num_seqs)
    weights = sum(layer.weight.nbytes for layer in bench.linears)
    kv = bench.backend.kv_bytes_per_block / 16 * position * num_seqs
    flops = 2 * sum(math.prod(layer.weight.shape) for layer in bench.linears) * num_seqs
    gemm_ms = _linears_ms(bench, num_seqs)
    kernels = kernel_times(lambda: graph_ms(bench, num_seqs, repeats=1, warm_up=0))
    return {
        "step_ms": step_ms,
        "device_ms": device_ms,
        "gap_share": 1 - device_ms / step_ms,
        "tokens_per_s": num_seqs / step_ms * 1e3,
        "bandwidth_share": (weights + kv) / (step_ms * 1e-3) / ceilings.bytes_per_s,
        "device_bandwidth_share": (weights + kv) / (device_ms * 1e-3) / ceilings.bytes_per_s,
        "gemm_ms": gemm_ms,
        "gemm_peak_share": flops / (gemm_ms * 1e-3) / ceilings.flops_per_s,
        **kernels,
    }


def prefill(bench: Bench, num_tokens: int, ceilings: Ceilings) -> dict[str, Any]:
    """One prompt in one step."""
    step = bench.step([0], [num_tokens])
    sampling = bench.sampling(step)
    step_ms = median_ms(lambda: bench.backend.execute(step, sampling), repeats=10)
    layers = [layer for layer in bench.linears if not layer.is_head]
    flops = 2 * sum(math.prod(layer.weight.shape) for layer in layers) * num_tokens
    gemm_ms = _linears_ms(bench, num_tokens, with_head=False)
    kernels = kernel_times(lambda: bench.backend.execute(step, sampling))
    return {
        "step_ms": step_ms,
        "tokens_per_s": num_tokens / step_ms * 1e3,
        "peak_share": flops / (step_ms * 1e-3) / ceilings.flops_per_s,
        "gemm_ms": gemm_ms,
        "gemm_peak_share": flops / (gemm_ms * 1e-3) / ceilings.flops_per_s,
        **kernels,
    }


def draw(
    bench: Bench, num_rows: int, *, timer: Callable[[Callable[[], object]], float] = median_ms
) -> dict[str, Any]:
    """The sampler alone, by what rows wish for."""
    kernels = bench.backend._kernels
    buffer = bench.backend._buffer
    assert buffer is not None
    from octavo_engine.backends.torch.device_step import StepSizes, cut_walks

    logits = torch.randn((num_rows, bench.backend.vocab_size), device=bench.backend.device) * 4
    step = bench.step([7] * num_rows, [1] * num_rows)
    sizes = StepSizes.of_decode(num_rows)
    wishes: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature": {"temperature": 0.8},
        "top_k": {"temperature": 0.8, "top_k": 50},
        "top_p": {"temperature": 0.8, "top_p": 0.95},
        "both": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    }
    found = {}
    for name, fields in wishes.items():
        tiles = cut_walks(step.seq_lens, 0)
        buffer.send(buffer.fill(step, bench.sampling(step, **fields), tiles, sizes))
        params = buffer.draw_params(sizes)
        found[f"{name}_ms"] = timer(lambda params=params: kernels.draw(logits, params))  # type: ignore[misc]  # a default is no annotation
    # The rows that are hardest: the edge that top-k and top-p look for is the whole row.
    equal = torch.zeros_like(logits)
    found["both_of_equal_ms"] = timer(lambda: kernels.draw(equal, params))
    return found


def upload() -> dict[str, Any]:
    """From memory to the device through the loader's ring. Files in page cache come at this speed
    or below; 16 GB at it is an estimate, not a measurement."""
    source = np.random.default_rng(0).integers(0, 255, UPLOAD_BYTES, dtype=np.uint8)
    target = torch.empty(UPLOAD_BYTES, dtype=torch.uint8, device="cuda")
    with Uploader(torch.device("cuda", 0)) as uploader:
        uploader.copy(target, source)
        uploader.finish()
        start = time.perf_counter()
        uploader.copy(target, source)
        uploader.finish()
        seconds = time.perf_counter() - start
    return {
        "gb_per_s": UPLOAD_BYTES / seconds / 1e9,
        "estimated_s_for_16_gb": 16e9 * seconds / UPLOAD_BYTES,
    }


def graph_ms(bench: Bench, num_seqs: int, **options: int) -> float:
    """The captured step alone, replayed without the host in between."""
    graphs = bench.backend._graphs
    assert graphs is not None and num_seqs in graphs.captured
    return median_ms(
        lambda: graphs.run(num_seqs, lambda: (torch.empty(0), torch.empty(0))), **options
    )


def kernel_times(work: Callable[[], object], *, most: int = 12) -> dict[str, Any]:
    """How many kernels some work launches, and the milliseconds of those that take the most."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    found: dict[str, Any] = {"num_kernels": sum(event.count for event in events)}
    for event in events[:most]:
        name = f"kernel {event.count} x {event.key[:100]}"
        found[name] = event.self_device_time_total / 1e3
    return found


def _linears_ms(bench: Bench, num_rows: int, *, with_head: bool = True) -> float:
    """All matrix products of a step one after the other, captured so that launches cost nothing."""
    layers = [layer for layer in bench.linears if with_head or not layer.is_head]
    inputs = {
        columns: torch.randn((num_rows, columns), dtype=torch.bfloat16, device="cuda")
        for columns in {layer.weight.shape[1] for layer in layers}
    }
    product = bench.backend._kernels.linear
    works = [functools.partial(product, inputs[layer.weight.shape[1]], layer) for layer in layers]
    return replayed_ms(works, repeats=20) * len(works)
