"""The step of an encoder's pass: one window, from its first row to its last."""

from __future__ import annotations

import numpy as np

from octavo_engine.backends.backend import BackendStep
from octavo_engine.config import BLOCK_SIZE


def encoder_step(num_rows: int) -> BackendStep:
    """Its keys and values lie in blocks 0, 1, 2, … of a cache of its own."""
    ramp = np.arange(num_rows, dtype=np.int32)
    return BackendStep(
        token_ids=np.zeros(num_rows, np.int32),
        positions=ramp,
        slots=ramp[None],
        seq_starts=np.array([0, num_rows], np.int32),
        seq_lens=np.array([num_rows], np.int32),
        rows=np.zeros(1, np.int32),
        block_tables=np.arange(-(-num_rows // BLOCK_SIZE), dtype=np.int32)[None, None],
        logit_rows=np.zeros(0, np.int32),
        copies=np.zeros((0, 3), np.int32),
    )
