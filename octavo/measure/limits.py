"""What this machine can do at most: the yardsticks that every figure is put beside.

Measured with numpy's BLAS, and torch's where torch is installed, so that our own kernels do not set
their own mark. Torch runs in a process of its own: it is needed for nothing else here.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.measure.machine_limits import MachineLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.config import EngineConfig

BUFFER_BYTES = 256 * 2**20  # far beyond any cache
MATRIX = 2048
ROUNDS = 5
TORCH_WITHIN_S = 30.0


def limits_for(config: EngineConfig) -> MachineLimits | None:
    """Of what the settings compute on, before the engine is there to share it. None: that
    device's limits are unknown. Raises ConfigError if there is no such device."""
    if config.device in ("auto", "cpu"):
        return measure_limits()
    if config.device != "cuda" or importlib.util.find_spec("torch") is None:
        return None  # without torch the engine says what is missing
    from octavo.measure.device_limits import measure_device_limits
    from octavo_engine.backends.torch.cuda import open_device

    return measure_device_limits(open_device("cuda"), dtype=config.dtype)


def measure_limits() -> MachineLimits:
    """Of the processor. Takes about 15 seconds with torch, 2 without."""
    return MachineLimits(num_cores(), _read_gb_s(), _gemm_peaks())


def _read_gb_s() -> float:
    parts = np.array_split(np.ones(BUFFER_BYTES // 8, np.float64), num_cores())
    readers: tuple[Callable[[np.ndarray], object], ...] = (
        lambda part: np.bitwise_or.reduce(part.view(np.int64)),
        lambda part: np.dot(part, part),
    )

    def read_all(reader: Callable[[np.ndarray], object]) -> None:
        threads = [threading.Thread(target=reader, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return BUFFER_BYTES / min(_best_s(lambda r=r: read_all(r)) for r in readers) / 1e9  # type: ignore[misc]  # binds now


def _gemm_peaks() -> dict[str, float]:
    """A narrower type is never slower than the float32 that it can be widened to."""
    a = np.full((MATRIX, MATRIX), 0.5, np.float32)
    b, out = a.copy(), np.empty_like(a)
    best = 2 * MATRIX**3 / _best_s(lambda: np.matmul(a, b, out=out)) / 1e9
    of_torch = _torch_peaks()
    float32 = max(best, of_torch.get("float32", 0.0))
    peaks = {"float32": float32}
    if "bf16" in of_torch or not _multiplies_bf16():
        peaks["bf16"] = max(float32, of_torch.get("bf16", 0.0))
    if "int8" in of_torch:
        peaks["int8"] = max(float32, of_torch["int8"])
    return peaks


def _multiplies_bf16() -> bool:
    """Then float32's peak says nothing of bf16's."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # not known: claim nothing
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def _torch_peaks() -> dict[str, float]:
    """Nothing where torch is not installed, or does not work."""
    if importlib.util.find_spec("torch") is None:
        return {}
    command = [sys.executable, "-m", "octavo.measure.torch_peaks"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=TORCH_WITHIN_S)
        lines = done.stdout
    except subprocess.TimeoutExpired as error:
        lines = error.stdout or b""  # what it had measured counts
    except subprocess.CalledProcessError as error:
        print(f"torch could not measure its matrix products: {error}", file=sys.stderr)
        return {}
    return {
        name: float(rate) for name, rate in (line.split() for line in lines.decode().splitlines())
    }


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _best_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(ROUNDS):
        started_at = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started_at)
    return best
