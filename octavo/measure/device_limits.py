"""What a GPU can do at most, measured on it: a copy, and large products of what it multiplies.

Everything else that is measured there is a share of these, here and in `benchmarks/gpu`.
"""

from __future__ import annotations

import os
import statistics
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import torch

from octavo.measure.machine_limits import MachineLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

COPY_BYTES = 4 << 30  # several times any L2
GEMM_SIZE = 8192

Timer: TypeAlias = "Callable[[Callable[[], object]], float]"


def median_ms(work: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> float:
    """The median of `repeats` runs, each between two events of the device."""
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times)


def replayed_ms(works: Sequence[Callable[[], object]], *, repeats: int = 10) -> float:
    """How long each takes on the device by itself, on average: all of them are captured as one
    graph, so that no launch is waited for. Give it enough of them, over different memory, that what
    they read is not in the cache when its turn comes again."""
    with torch.inference_mode():
        for work in works:  # what is compiled or chosen at the first launch
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        return median_ms(graph.replay, repeats=repeats) / len(works)


def copy_bandwidth(
    device: torch.device, *, num_bytes: int = COPY_BYTES, timer: Timer = median_ms
) -> float:
    """Bytes read and written in a second by a copy on the device."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (timer(lambda: target.copy_(source)) * 1e-3)


def gemm_flops(
    device: torch.device, kind: str = "bf16", *, size: int = GEMM_SIZE, timer: Timer = median_ms
) -> float:
    """Operations in a second of a large product of random numbers (zeros would be faster)."""
    a, b = (torch.randn((size, size), device=device) for _ in range(2))
    return 2 * size**3 / (timer(_product(kind, a, b)) * 1e-3)


def measure_device_limits(
    device: torch.device,
    *,
    dtype: str = "auto",
    num_bytes: int = COPY_BYTES,
    size: int = GEMM_SIZE,
    timer: Timer = median_ms,
) -> MachineLimits:
    """About a second. The memory goes back: an engine counts what is free before it begins."""
    if device.type == "cuda":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    first, *others = ("float32",) if dtype == "float32" else ("bf16", "int8", "fp8")
    peaks = {first: gemm_flops(device, first, size=size, timer=timer) / 1e9}
    for kind in others:
        # Older devices, and other makers', have no products of these.
        with suppress(RuntimeError, NotImplementedError):
            peaks[kind] = gemm_flops(device, kind, size=size, timer=timer) / 1e9
    bandwidth = copy_bandwidth(device, num_bytes=num_bytes, timer=timer) / 1e9
    name = str(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        torch.cuda.empty_cache()
    return MachineLimits(len(os.sched_getaffinity(0)), bandwidth, peaks, device=name)


def _product(kind: str, a: Tensor, b: Tensor) -> Callable[[], object]:
    match kind:
        case "float32":
            return lambda: a @ b
        case "bf16":
            left, right = a.bfloat16(), b.bfloat16()
            return lambda: left @ right
        case "int8":
            left, right = (x.mul(32).clamp(-127, 127).to(torch.int8) for x in (a, b))
            return lambda: torch._int_mm(left, right)
        case "fp8":
            left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            scale = torch.ones((), device=a.device)
            return lambda: torch._scaled_mm(
                left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
            )
    raise ValueError(f"no product of {kind} is known")
