"""What this machine can do at most: the yardsticks that every figure is put beside.

Measured with numpy and its BLAS, so that our own kernels do not set their own mark. On processors
that multiply bf16 directly the float32 peak is the lower of two marks; the table says which it is.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

import numpy as np

BUFFER_BYTES = 256 * 2**20  # far beyond any cache
MATRIX = 2048
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Best of several rounds: noise only ever makes a machine look slower."""

    num_cores: int
    read_gb_s: float  # all cores together
    gemm_gflop_s: float  # float32, all cores together


def measure_limits() -> Limits:
    return Limits(len(os.sched_getaffinity(0)), _read_gb_s(), _gemm_gflop_s())


def _read_gb_s() -> float:
    num_threads = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(BUFFER_BYTES // 8, np.int64), num_threads)

    def read_all() -> None:
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(p,)) for p in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return BUFFER_BYTES / _best_s(read_all) / 1e9


def _gemm_gflop_s() -> float:
    a = np.full((MATRIX, MATRIX), 0.5, np.float32)
    b, out = a.copy(), np.empty_like(a)
    return 2 * MATRIX**3 / _best_s(lambda: np.matmul(a, b, out=out)) / 1e9


def _best_s(work) -> float:  # type: ignore[no-untyped-def]  # any callable
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        started_at = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started_at)
    return best


if __name__ == "__main__":
    limits = measure_limits()
    print(
        f"{limits.num_cores} cores, {limits.read_gb_s:.1f} GB/s read, "
        f"{limits.gemm_gflop_s:.0f} GFLOP/s float32"
    )
