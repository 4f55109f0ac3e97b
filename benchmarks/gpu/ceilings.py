"""What the device can do at best, measured: every other number is a share of these."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

COPY_BYTES = 4 << 30
GEMM_SIZE = 8192


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


def copy_bandwidth(num_bytes: int = COPY_BYTES) -> float:
    """Bytes read and written in a second by a copy on the device, several times its L2."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / (median_ms(lambda: target.copy_(source)) * 1e-3)


def gemm_flops(size: int = GEMM_SIZE) -> float:
    """Operations in a second of a large bf16 product of random numbers (zeros would be faster)."""
    a, b = (torch.randn((size, size), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / (median_ms(lambda: a @ b) * 1e-3)
