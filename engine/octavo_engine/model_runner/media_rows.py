"""Rows of encoded pictures, and those that a step reads in place of embeddings."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from numpy.typing import NDArray

    from octavo_engine.backends.backend import BackendStep
    from octavo_engine.backends.media import MediaEncoder
    from octavo_engine.state.batch import EncodeParts, ScheduledBatch
    from octavo_engine.state.media import MediaItem, MediaSpan

logger = logging.getLogger(__name__)


def places_of(spans: List[MediaSpan], start: int, end: int) -> NDArray[np.int32]:
    """[3, end - start]: where tokens of a sequence are in time, in lines and in columns. Those of a
    picture are one moment; what follows is behind its last line and its last column."""
    places = np.tile(np.arange(start, end, dtype=np.int32), (3, 1))
    for span in spans:
        first, last = max(span.first, start), min(span.end, end)
        if first < last and span.grid is not None:
            begin = places[0, first - start] - (first - span.first)
            line, column = np.divmod(np.arange(first, last) - span.first, span.grid[1])
            places[:, first - start : last - start] = begin
            places[1, first - start : last - start] += line.astype(np.int32)
            places[2, first - start : last - start] += column.astype(np.int32)
        if span.end < end:
            places[:, max(0, span.end - start) :] -= span.shortening
    return places


def rows_between(span: MediaSpan, first: int, end: int) -> NDArray[np.int64]:
    """Of tokens [first, end) of a sequence, which are the picture's: the row that each reads, or
    -1 where it is text behind a line."""
    index = np.arange(first - span.first, end - span.first)
    if not span.line_rows:
        return index
    line, column = np.divmod(index, span.line_rows + 1)
    return np.where(column < span.line_rows, index - line, -1)


class Encoded(NamedTuple):
    """What came of a step's picture."""

    seconds: float = 0.0
    error: str | None = None


class MediaRows:
    """Holds what `scheduling.media` decides to hold."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        self._rows: dict[bytes, NDArray[np.float32]] = {}

    def take(self, batch: ScheduledBatch) -> Encoded:
        """Give up and encode as the batch says. A picture that cannot be encoded is no reason to
        fail sequences that do not read it."""
        for digest in batch.media_dropped:
            self._rows.pop(digest, None)
        if batch.encode is None:
            return Encoded()
        started, error = time.perf_counter(), None
        try:
            self._encode(batch.encode, batch.encode_parts)
        except Exception as raised:
            if batch.reads_encoded:
                raise
            logger.exception("A picture could not be encoded")
            error = type(raised).__name__
        return Encoded(time.perf_counter() - started, error)

    def _encode(self, item: MediaItem, parts: EncodeParts) -> None:
        for part in range(parts.first, parts.end):
            rows = self._encoder.encode_part(item, part, parts.total)
            if rows is not None:
                self._rows[item.digest] = rows

    def time_picture(self) -> float:
        """How many seconds a row of the largest takes, about."""
        return self._encoder.measure() / self._encoder.config.num_rows

    def _turn(self, step: BackendStep, batch: ScheduledBatch) -> None:
        """Where tokens among and behind pictures are for a rope of three axes."""
        for index, sequence in enumerate(batch.sequences):
            spans = sequence.request.media
            if not spans or spans[0].grid is None:
                continue
            start, end = batch.starts[index], batch.starts[index] + batch.counts[index]
            if step.rope_positions is None:
                step.rope_positions = np.tile(step.positions, (3, 1))
            at = int(step.seq_starts[index])
            step.rope_positions[:, at : at + end - start] = places_of(spans, start, end)

    def add_to(self, step: BackendStep, batch: ScheduledBatch) -> None:
        """Which tokens of the step are pictures', their rows, and how far they see."""
        self._turn(step, batch)
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
                assert len(rows) == span.num_rows, "as many rows as placeholders"
                where = rows_between(span, first, last)
                is_row = where >= 0
                read = where[is_row]
                parts.append(rows[read[0] : read[-1] + 1] if len(read) else rows[:0])
                input_rows[at + first : at + last][is_row] = np.arange(
                    num_rows, num_rows + len(read)
                )
                num_rows += len(read)
                if span.is_two_way:
                    assert last == span.end, "a chunk ends inside a picture whose rows see it all"
                    seen_to = np.zeros_like(input_rows) if seen_to is None else seen_to
                    seen_to[at + first : at + last] = span.end
        if parts:
            step.input_rows, step.inputs = input_rows, np.concatenate(parts)
            step.seen_to = seen_to
