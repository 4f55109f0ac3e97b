"""The peaks of torch's matrix products here, a line of stdout for each: dtype and GFLOP/s."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MATRIX = 1024
ROUNDS = 8


def main() -> None:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with torch.inference_mode():
        for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
            a = torch.full((MATRIX, MATRIX), 0.5, dtype=dtype)
            print(name, _gflop_s(lambda a=a: a @ a), flush=True)  # type: ignore[misc]  # binds now
        ones = torch.ones((MATRIX, MATRIX), dtype=torch.int8)
        with suppress(RuntimeError, NotImplementedError):  # this build may have none for a CPU
            print("int8", _gflop_s(lambda: torch._int_mm(ones, ones)), flush=True)


def _gflop_s(work: Callable[[], object]) -> float:
    best = float("inf")  # of all rounds: the first, which prepares, is never it
    for _ in range(ROUNDS):
        started_at = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started_at)
        if best > 0.5:  # emulated: nothing to wait for
            break
    return 2 * MATRIX**3 / best / 1e9


if __name__ == "__main__":
    main()
