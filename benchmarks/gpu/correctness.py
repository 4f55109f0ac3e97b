"""The device against the same model in float32 on the host: nothing is timed that is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu.random_model import TINY, Bench
from octavo_engine.backends.backend import BackendLimits

LIMITS = BackendLimits(max_tokens=256, max_seqs=4, max_logit_rows=8, max_model_len=1024)
# Values between operations keep 8 bits: some ten roundings of 2^-9 in each of three layers.
MAX_ERROR = 0.03


def check(device_name: str = "cuda", **options: Any) -> dict[str, float]:
    """Root mean square errors of logits, as shares of their deviation; raises if one is too large.

    Prompts in chunks, mixed steps, and decoding by launches and then by graphs.
    """
    device = Bench.make(TINY, LIMITS, device=device_name, is_portable=True, **options)
    truth = Bench.make(
        TINY, LIMITS, device="cpu", dtype=torch.float32, is_portable=True, kernels="plain"
    )
    errors: dict[str, float] = {}
    starts = [0, 0, 0]
    script = [("prompts", [100, 7, 130]), ("mixed", [1, 90, 1])] + [("decode", [1, 1, 1])] * 6
    for name, counts in script:
        steps = [bench.step(starts, counts) for bench in (device, truth)]
        found, expected = (
            bench.backend.logits(step) for bench, step in zip((device, truth), steps, strict=True)
        )
        error = float(np.sqrt(np.mean((found - expected) ** 2)) / np.std(expected))
        errors[name] = max(error, errors.get(name, 0.0))
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
    if not max(errors.values()) < MAX_ERROR:
        raise AssertionError(f"the device's logits are wrong: {errors}, at most {MAX_ERROR}")
    device.backend.close()
    truth.backend.close()
    return errors
