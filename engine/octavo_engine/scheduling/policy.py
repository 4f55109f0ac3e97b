"""The order of sequences, and the queue of those that wait."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from octavo_engine.state.request import BACKGROUND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.config import SchedulerConfig
    from octavo_engine.state.sequence import Sequence

by_order = attrgetter("order")


def place_in_line(
    config: SchedulerConfig, *, priority: int, number: int, arrived_at: float
) -> tuple[float, int]:
    """The sort key of a sequence, settled on arrival: lower is served first and preempted last.

    Under `fcfs` the order of arrival. Under `priority` a level is worth `aging_s` seconds of
    waiting, so a stream of urgent requests delays the others by a bounded time and never for good.
    Under both, what is in the background comes behind everything else.
    """
    if priority >= BACKGROUND:
        return (math.inf, number)
    if config.policy == "fcfs":
        return (0.0, number)
    return (arrived_at + priority * config.aging_s, number)


class WaitingQueue:
    """Sequences that do not run yet, or no longer, in policy order."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self.num_tokens = 0
        # Of those that are not in the background:
        self.num_foreground = 0
        self.num_foreground_tokens = 0
        self.num_foreground_allowed = 0  # tokens that they may add

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def push(self, sequence: Sequence) -> None:
        insort(self._line, sequence, key=by_order)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._line, sequence.order, key=by_order)
        assert self._line[place] is sequence
        del self._line[place]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_tokens = len(sequence.token_ids)
        self.num_tokens += sign * num_tokens
        if not sequence.is_background:
            self.num_foreground += sign
            self.num_foreground_tokens += sign * num_tokens
            self.num_foreground_allowed += sign * (sequence.max_num_tokens - num_tokens)
