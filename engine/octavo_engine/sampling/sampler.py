"""The sampler on CPU: custom processors, then one kernel call for all rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo_engine import _native
from octavo_engine.sampling.batch import Sampled
from octavo_engine.sampling.processors import apply_processors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.sampling.batch import SamplingBatch


def sample(team: _native.Team, logits: NDArray[np.float32], batch: SamplingBatch) -> Sampled:
    """Sample or score every row of `logits` [S, vocabulary], which is changed in place."""
    apply_processors(batch.processed, logits)
    sampled = _empty(len(logits), batch.num_logprobs)
    bias, allowed, logprob_ids = batch.bias, batch.allowed, batch.logprob_ids
    masks = None if batch.masks is None else batch.masks.take()
    _native.sample(
        team,
        logits,
        batch.table,
        batch.rows,
        batch.positions,
        batch.targets,
        batch.history,
        None if bias is None else bias.starts,
        None if bias is None else bias.ids,
        None if bias is None else bias.values,
        None if allowed is None else allowed.starts,
        None if allowed is None else allowed.ids,
        None if masks is None else masks.rows,
        None if masks is None else masks.bits,
        None if logprob_ids is None else logprob_ids.starts,
        None if logprob_ids is None else logprob_ids.ids,
        batch.num_logprobs,
        sampled.tokens,
        sampled.status,
        sampled.logprobs,
        sampled.ranks,
        sampled.top_ids,
        sampled.top_logprobs,
    )
    return sampled


def _empty(num_rows: int, num_logprobs: int) -> Sampled:
    sampled = Sampled(np.empty(num_rows, np.int32), np.empty(num_rows, np.uint8))
    if num_logprobs >= 0:
        sampled.logprobs = np.empty(num_rows, np.float32)
        sampled.ranks = np.empty(num_rows, np.int32)
        sampled.top_ids = np.empty((num_rows, num_logprobs), np.int32)
        sampled.top_logprobs = np.empty((num_rows, num_logprobs), np.float32)
    return sampled
