"""Which picture a step encodes, and how far chunks may go before the rows of pictures are there."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.media import MediaItem, MediaSpan
    from octavo_engine.state.sequence import Sequence

FORGET = 0.8  # weight of the past at each new picture


class MediaLimits(NamedTuple):
    """Of a model that sees."""

    row_bytes: int  # of one token's input
    cache_bytes: int  # for rows that are kept for the next request with that picture


class MediaPlanner:
    """Encoded pictures, the least recently used one first, as the runner holds them.

    A step encodes at most one picture, in the step that first needs its rows; chunks of other
    sequences stop before pictures that are not there. What a step reads is not given up in it.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._held: OrderedDict[bytes, int] = OrderedDict()  # by digest, in bytes
        self._num_bytes = 0
        self._read: set[bytes] = set()  # by the step that is planned
        self._row_s = 0.0  # that a row of a picture takes to encode, lately
        self.hits = self.misses = 0
        self.encoder_s = 0.0

    @staticmethod
    def whole_spans(behind: List[Sequence], counts: List[int], room: int) -> list[int]:
        """`counts` so that none ends inside a picture whose tokens see each other. The oldest
        sequence computes all of a picture that it has come to, as far as the step has `room`,
        whatever its share of the step was; others wait before it."""
        whole = []
        for index, (sequence, count) in enumerate(zip(behind, counts, strict=True)):
            start = sequence.num_launched_tokens
            count = min(count, max(0, room))
            cut = _cut_span(sequence, start + count) if count else None
            if cut is not None and cut.first > start:
                count = cut.first - start
            elif cut is not None:
                rest = cut.end - start
                count = rest if index == 0 and rest <= room else 0
            whole.append(count)
            room -= count
        return whole

    def start_step(self) -> None:
        self._read.clear()

    def clip(self, sequence: Sequence, start: int, count: int, batch: ScheduledBatch) -> int:
        """How many of `count` tokens the step can compute; what it must encode for that is in the
        batch."""
        for span in sequence.request.media:
            if span.end <= start or span.first >= start + count:
                continue
            if not self._use(span, sequence, batch):
                return max(0, span.first - start)
        return count

    def finish_step(self, batch: ScheduledBatch) -> None:
        """Give up what there is no room for, least recently used first."""
        for digest in list(self._held):
            if self._num_bytes <= self._limits.cache_bytes:
                break
            if digest not in self._read:
                self._num_bytes -= self._held.pop(digest)
                batch.media_dropped.append(digest)

    def encode_s(self, sequences: list[Sequence], budget: int) -> float:
        """What one picture will take, if one of these needs one within so many tokens."""
        for sequence in sequences:
            start = sequence.num_launched_tokens
            for span in sequence.request.media:
                is_read = span.end > start and span.first < start + budget
                if is_read and span.digest not in self._held:
                    return self._row_s * span.length
        return 0.0

    def expected_s(self, batch: ScheduledBatch) -> float:
        return self._row_s * batch.encode_rows

    def expect(self, row_s: float) -> None:
        """A row takes so long, as far as is known before the first picture."""
        self._row_s = row_s

    def observe(self, encode_s: float, num_rows: int) -> None:
        """A step's picture of so many rows took so long."""
        self.encoder_s += encode_s
        past = FORGET if self._row_s else 0.0
        self._row_s = past * self._row_s + (1.0 - past) * encode_s / num_rows

    def drop(self, item: MediaItem | None) -> None:
        """It was to be encoded by a step that failed."""
        if item is not None and item.digest in self._held:
            self._num_bytes -= self._held.pop(item.digest)

    def _use(self, span: MediaSpan, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """Whether its rows are there in the step."""
        is_new = span.digest not in self._read
        if span.digest in self._held:
            self.hits += is_new
        elif batch.encode is None:
            items = sequence.request.media_items
            batch.encode = next(item for item in items if item.digest == span.digest)
            batch.encode_rows = span.length
            self._held[span.digest] = span.length * self._limits.row_bytes
            self._num_bytes += self._held[span.digest]
            self.misses += 1
        else:
            return False
        self._held.move_to_end(span.digest)
        self._read.add(span.digest)
        return True


def _cut_span(sequence: Sequence, end: int) -> MediaSpan | None:
    """The two-way picture inside which a chunk ends that ends at `end`."""
    spans = sequence.request.media
    return next((s for s in spans if s.is_two_way and s.first < end < s.end), None)
