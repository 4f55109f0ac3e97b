"""Sampling a step's logits, which may be none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.sampling.batch import Sampled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine import _native
    from octavo_engine.sampling.batch import SamplingBatch


def sample_rows(
    team: _native.Team, logits: NDArray[np.float32], sampling: SamplingBatch
) -> Sampled:
    """Sample or score every row; a step within a long prompt has none."""
    if not len(logits):
        return Sampled(np.empty(0, np.int32), np.empty(0, np.uint8))
    from octavo_engine.sampling.sampler import sample

    return sample(team, logits, sampling)
