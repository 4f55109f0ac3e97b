"""Rows of encoded pictures, and those that a step reads in place of embeddings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.state.media import MediaItem

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

    def time_picture(self) -> float:
        """How many seconds one takes that nothing is kept of."""
        side = self._encoder.config.vision.image_size
        started = time.perf_counter()
        self._encoder.encode(MediaItem(bytes(16), side, side, bytes(3 * side * side)))
        return time.perf_counter() - started

    def add_to(self, step: BackendStep, batch: ScheduledBatch) -> None:
        """Which tokens of the step are pictures', their rows, and how far they see."""
        parts: list[NDArray[np.float32]] = []
        seen_to: NDArray[np.int32] | None = None
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
                if span.is_two_way:
                    assert last == span.end, "a chunk ends inside a picture whose rows see it all"
                    seen_to = np.zeros_like(input_rows) if seen_to is None else seen_to
                    seen_to[at + first : at + last] = span.end
        if parts:
            step.input_rows, step.inputs = input_rows, np.concatenate(parts)
            step.seen_to = seen_to
