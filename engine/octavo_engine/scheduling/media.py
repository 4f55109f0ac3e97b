"""Which picture a step encodes, how much of it, and how far chunks may go before its rows are
there."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.state.batch import EncodeParts

if TYPE_CHECKING:
    from collections.abc import Sequence as List

    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.media import MediaItem, MediaSpan
    from octavo_engine.state.sequence import Sequence

FORGET = 0.8  # weight of the past at each new picture
PARTS_A_STEP = 4  # so that what a step has room for is used, whatever else is in it
MAX_PARTS = 2048


class MediaLimits(NamedTuple):
    """Of a model that sees."""

    row_bytes: int  # of one token's input
    cache_bytes: int  # for rows that are kept for the next request with that picture


class _UnderWay(NamedTuple):
    """A picture of which some parts are encoded."""

    item: MediaItem
    num_rows: int
    parts: int  # that are done
    num_parts: int
    spent_s: float = 0.0


class MediaPlanner:
    """Encoded pictures, the least recently used one first, as the runner holds them.

    A step encodes at most one picture, from when its rows are first needed, in parts: as many a
    step as there is time for, and one at least. Once begun it goes on while a sequence waits for
    it; chunks of sequences stop before pictures that are not there. Beside sequences that decode
    its rows are read by the step behind the last part, so that one that fails is no concern of
    theirs; else by the same. What a step reads is not given up in it.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._held: OrderedDict[bytes, int] = OrderedDict()  # by digest, in bytes
        self._num_bytes = 0
        self._read: set[bytes] = set()  # by the step that is planned
        self._row_s = 0.0  # that a row of a picture takes to encode, lately
        self._under_way: _UnderWay | None = None
        self._is_shared = False  # sequences decode in the step that is planned
        self._room_s = self._shared_room_s = 0.0
        self._behind: List[Sequence] = ()
        self._unread: set[bytes] = set()  # encoded for a step to come: no hit when that reads it
        self._lost: list[bytes] = []  # that the runner may hold, of steps that failed
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

    def start_step(
        self, batch: ScheduledBatch, behind: List[Sequence], *, room_s: float, shared_room_s: float
    ) -> None:
        """Before chunks of those behind are planned. The step has `room_s` for prompts and
        pictures; `shared_room_s` is what one has in which sequences decode."""
        self._read.clear()
        self._is_shared = bool(batch.sequences)
        self._room_s, self._shared_room_s, self._behind = room_s, shared_room_s, behind
        way = self._under_way
        if way is not None and any(awaits(s, way.item.digest) for s in behind):
            self._encode(way, batch)

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
        if not batch.is_empty:
            batch.media_dropped += self._lost
            self._lost.clear()
        for digest in list(self._held):
            if self._num_bytes <= self._limits.cache_bytes:
                break
            if digest not in self._read:
                self._num_bytes -= self._held.pop(digest)
                self._unread.discard(digest)
                batch.media_dropped.append(digest)

    def encode_s(self, batch: ScheduledBatch, sequences: list[Sequence], budget: int) -> float:
        """What the step's picture takes of it, or will if one of these needs one within so many
        tokens."""
        if batch.encode is not None:
            return self.expected_s(batch)
        for sequence in sequences:
            start = sequence.num_launched_tokens
            for span in sequence.request.media:
                is_read = span.end > start and span.first < start + budget
                if is_read and span.digest not in self._held:
                    return min(self._row_s * span.length, max(0.0, self._encode_room_s()))
        return 0.0

    def expected_s(self, batch: ScheduledBatch) -> float:
        return self._row_s * batch.encode_rows * batch.encode_parts.share

    def expect(self, row_s: float) -> None:
        """A row takes so long, as far as is known before the first picture."""
        self._row_s = row_s

    def take(self, batch: ScheduledBatch, encode_s: float) -> None:
        """What the step was to encode is encoded, and took so long."""
        way, item = self._under_way, batch.encode
        assert way is not None and item is not None and way.item.digest == item.digest
        self.encoder_s += encode_s
        spent_s = way.spent_s + encode_s
        self._under_way = way._replace(parts=batch.encode_parts.end, spent_s=spent_s)
        if batch.encode_parts.is_last:
            self._under_way = None
            if item.digest not in self._held:
                self._hold(item.digest, way.num_rows)
                self._unread.add(item.digest)
            past = FORGET if self._row_s else 0.0
            self._row_s = past * self._row_s + (1.0 - past) * spent_s / way.num_rows

    def drop(self, batch: ScheduledBatch) -> None:
        """What the step was to encode is not, or not for sure: it begins anew if it is needed."""
        self._under_way = None
        if batch.encode is None:
            return
        digest = batch.encode.digest
        self._lost.append(digest)
        self._unread.discard(digest)
        if digest in self._held:
            self._num_bytes -= self._held.pop(digest)

    def give_up(self) -> None:
        """What is under way: nothing waits for it."""
        self._under_way = None

    def _begin(self, span: MediaSpan, sequence: Sequence) -> _UnderWay:
        """That picture, from where it stands. Another one that is under way is given up: none that
        runs waits for it."""
        way = self._under_way
        if way is not None and way.item.digest == span.digest:
            return way
        self.misses += 1
        item = next(i for i in sequence.request.media_items if i.digest == span.digest)
        num_parts = 1
        if self._shared_room_s > 0.0:
            whole_s = self._row_s * span.length
            in_room = math.ceil(PARTS_A_STEP * whole_s / self._shared_room_s)
            num_parts = min(MAX_PARTS, max(1, in_room))
        return _UnderWay(item, span.length, 0, num_parts)

    def _encode(self, way: _UnderWay, batch: ScheduledBatch) -> None:
        """As much of what is left of it as the step has time for."""
        self._under_way = way
        count = way.num_parts - way.parts
        part_s = self._row_s * way.num_rows / way.num_parts
        if part_s:
            count = min(count, max(1, int(self._encode_room_s() / part_s)))
        batch.encode, batch.encode_rows = way.item, way.num_rows
        batch.encode_parts = EncodeParts(way.parts, way.parts + count, way.num_parts)

    def _encode_room_s(self) -> float:
        """Half of the step's time is left to prompts that can go on."""
        is_alone = all(self._is_before_picture(sequence) for sequence in self._behind)
        return self._room_s if is_alone else self._room_s / 2

    def _is_before_picture(self, sequence: Sequence) -> bool:
        """Its next token is of a picture that is not there."""
        start = sequence.num_launched_tokens
        spans = sequence.request.media
        return any(s.first <= start < s.end and s.digest not in self._held for s in spans)

    def _hold(self, digest: bytes, num_rows: int) -> None:
        self._held[digest] = num_rows * self._limits.row_bytes
        self._num_bytes += self._held[digest]

    def _use(self, span: MediaSpan, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """Whether its rows are there in the step."""
        is_new = span.digest not in self._read
        if span.digest in self._held:
            self.hits += is_new and span.digest not in self._unread
            self._unread.discard(span.digest)
        else:
            if batch.encode is None:
                self._encode(self._begin(span, sequence), batch)
            is_this = batch.encode is not None and batch.encode.digest == span.digest
            if self._is_shared or not (is_this and batch.encode_parts.is_last):
                return False
            self._hold(span.digest, span.length)
            batch.reads_encoded = True
        self._held.move_to_end(span.digest)
        self._read.add(span.digest)
        return True


def awaits(sequence: Sequence, digest: bytes) -> bool:
    """Whether it has tokens of that picture to compute."""
    start = sequence.num_launched_tokens
    return any(s.digest == digest and s.end > start for s in sequence.request.media)


def _cut_span(sequence: Sequence, end: int) -> MediaSpan | None:
    """The two-way picture inside which a chunk ends that ends at `end`."""
    spans = sequence.request.media
    return next((s for s in spans if s.is_two_way and s.first < end < s.end), None)
