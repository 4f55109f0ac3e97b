"""Rows of encoded pictures, and those that a step reads in place of embeddings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.media import MediaEncoder
    from octavo_engine.state.batch import ScheduledBatch


class MediaRows:
    """Holds what `scheduling.media` decides to hold."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        self._rows: dict[bytes, NDArray[np.float32]] = {}

    def take(self, batch: ScheduledBatch) -> float:
        """Give up and encode as the batch says; how many seconds the picture took."""
        for digest in batch.media_dropped:
            self._rows.pop(digest, None)
        if batch.encode is None:
            return 0.0
        started = time.perf_counter()
        self._rows[batch.encode.digest] = self._encoder.encode(batch.encode)
        return time.perf_counter() - started

    def add_to(self, step: BackendStep, batch: ScheduledBatch) -> None:
        """Which tokens of the step are pictures', and their rows."""
        parts: list[NDArray[np.float32]] = []
        input_rows = np.full(len(step.token_ids), -1, np.int32)
        num_rows = 0
        for index, sequence in enumerate(batch.sequences):
            start, end = batch.starts[index], batch.starts[index] + batch.counts[index]
            if start >= sequence.media_end:
                continue
            at = int(step.seq_starts[index]) - start  # of the sequence's token 0 in the step
            for span in sequence.request.media:
                first, last = max(span.first, start), min(span.end, end)
                if first >= last:
                    continue
                rows = self._rows[span.digest]
                assert len(rows) == span.length, "as many rows as placeholders"
                parts.append(rows[first - span.first : last - span.first])
                count = last - first
                input_rows[at + first : at + last] = np.arange(num_rows, num_rows + count)
                num_rows += count
        if parts:
            step.input_rows, step.inputs = input_rows, np.concatenate(parts)
