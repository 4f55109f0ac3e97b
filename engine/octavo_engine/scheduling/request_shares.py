"""Fairness between requests: what one request of many sequences may take while others are there.

Requests take turns: a waiting sequence stands behind those of requests with fewer sequences ahead
of it or running, and where no row is free the request with the most running sequences gives one up.

Time is shared too, while a small request, of a single sequence, waits or runs, or did so a moment
ago. The first sequence of a large request decodes as any other; the decoding of its further ones,
and all of its prompts, lengthen the steps by a bounded part. A request that is alone has all there
is.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING

from octavo_engine.scheduling.chunks import MIN_CHUNK
from octavo_engine.scheduling.time_account import TimeAccount

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as List

    from octavo_engine.config import SchedulerConfig
    from octavo_engine.scheduling.step_time import StepTimeModel
    from octavo_engine.state.sequence import Sequence

SHARE = 0.25  # of the time of a step, for all further sequences, beside small requests
TICK_S = 1e-6  # of a step whose length is not known: it earns something too
LATELY_S = 0.25  # so long after the last small request the next one may be about to come


class RequestShares:
    """Counts the sequences of each request that wait or run. Background ones are no part of it."""

    def __init__(self, config: SchedulerConfig, step_time: StepTimeModel) -> None:
        self._account = TimeAccount(step_time, share=SHARE)
        self._by_priority = config.policy == "priority"
        self._level = config.aging_s if self._by_priority else 1.0
        self._num_singles = 0  # requests that came with one sequence
        self._counts: dict[str, int] = {}  # sequences of each other request
        self._num_large = 0  # of these requests, those with two sequences or more
        self._small_at = float("-inf")  # when a small request was there last
        self._served: set[str] = set()  # requests whose first sequence has its place in this step
        self.is_limited = False  # in this step
        self._num_rows = self._max_rows = 0  # further sequences that decode in it, and at most
        self._most_rows = 0  # in a step of late

    # -- the sequences of each request

    def enter(self, sequence: Sequence) -> None:
        """It waits or runs from now on."""
        if sequence.is_background:
            return
        if not sequence.group:
            self._num_singles += 1
            return
        count = self._counts.get(sequence.group, 0) + 1
        self._counts[sequence.group] = count
        self._num_large += count == 2

    def leave(self, sequence: Sequence) -> None:
        """It ended, or was suspended."""
        if sequence.is_background:
            return
        if not sequence.group:
            self._num_singles -= 1
            return
        count = self._counts[sequence.group] - 1
        self._num_large -= count == 1
        if count:
            self._counts[sequence.group] = count
        else:
            del self._counts[sequence.group]

    @property
    def _num_requests(self) -> int:
        return self._num_singles + len(self._counts)

    # -- the order of those that wait

    def in_order(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> list[Sequence]:
        """Those that wait, in turns between requests; the first of each in policy order. Under the
        priority policy a sequence of the same request ahead counts as one level of priority."""
        line = list(waiting)
        if not self._num_large or self._num_requests == 1:
            return line
        placed = self._placed(line, _num_running(running))
        placed.sort(key=itemgetter(0))
        return [sequence for _, sequence in placed]

    def ahead_of(
        self, sequence: Sequence | None, waiting: Iterable[Sequence], running: Iterable[Sequence]
    ) -> list[Sequence] | None:
        """The waiting sequences that come before one that arrives now, of a small request if it is
        None. None: all of them."""
        group = "" if sequence is None else sequence.group
        has_turns = self._num_large > 0 and (self._num_requests > 1 or group not in self._counts)
        if not has_turns and (sequence is None or not self._by_priority):
            return None
        if sequence is None and self._by_priority:
            return None
        counts = _num_running(running)
        placed = self._placed(waiting, counts)
        place = (0.0, math.inf) if sequence is None else self._place(sequence, counts[group])
        return [other for its_place, other in placed if its_place < place]

    def to_displace(self, waiting: Iterable[Sequence], running: List[Sequence]) -> Sequence | None:
        """The sequence that must give its row to the first of those that wait, while no row is
        free: of the request with the most of them, where the other request would still have
        fewer."""
        if not self._num_large or self._num_requests == 1:
            return None
        first = self.in_order(waiting, running)[0]
        counts = _num_running(running)
        group, most = max(counts.items(), key=itemgetter(1), default=("", 0))
        if first.is_background or first.blocked_at is not None or most <= counts[first.group] + 1:
            return None
        last = next(s for s in reversed(running) if s.group == group)
        if self._place(last, most - 1) < self._place(first, counts[first.group]):
            return None
        return last

    def _placed(
        self, waiting: Iterable[Sequence], counts: Counter[str]
    ) -> list[tuple[tuple[float, int], Sequence]]:
        """Each with its place; they are counted with those that run."""
        placed = []
        for sequence in waiting:
            placed.append((self._place(sequence, counts[sequence.group]), sequence))
            if sequence.group:
                counts[sequence.group] += 1
        return placed

    def _place(self, sequence: Sequence, num_ahead: int) -> tuple[float, int]:
        first, number = sequence.order
        return first + num_ahead * self._level, number

    # -- one step

    def start_step(self, now: float) -> None:
        has_small = self._num_requests > self._num_large
        if self._num_singles or (self._num_large and has_small):
            self._small_at = now
        self.is_limited = self._num_large > 0 and now - self._small_at <= LATELY_S
        self._served.clear()
        # What a row costs is a guess from the steps of late, which may all have had as many: a step
        # with many more comes after one with a few more, from which the price was learned.
        self._most_rows = max(self._num_rows, self._most_rows - 1)
        self._max_rows = 2 * self._most_rows + 1
        self._num_rows = 0

    def pays_for_prompt(self, sequence: Sequence) -> bool:
        """Whether its prompt is computed out of the share in this step."""
        return self.is_limited and self._counts.get(sequence.group, 0) > 1

    def pays_for_row(self, sequence: Sequence) -> bool:
        """Whether it decodes out of the share in this step."""
        return self.is_limited and sequence.group in self._served

    def serve(self, sequence: Sequence) -> None:
        """It takes part in the step; those of its request that follow are further ones."""
        if sequence.group:
            self._served.add(sequence.group)

    @property
    def has_credit(self) -> bool:
        return self._account.has_credit

    def pay_row(self) -> bool:
        """For one sequence that decodes; false if it must sit out."""
        if self._num_rows == self._max_rows or not self._account.pay_row():
            return False
        self._num_rows += 1
        return True

    def pay_prompt(self, sequence: Sequence, *, is_idle: bool) -> int:
        """So many tokens of its prompt may be computed; some, where the step is empty without."""
        return self._account.pay_prompt(sequence) or (MIN_CHUNK if is_idle else 0)

    def owe(self, num_tokens: int) -> None:
        """So many tokens of a prompt were computed beside those that were paid for."""
        self._account.owe(num_tokens)

    def earn(self, step_s: float) -> None:
        """Nothing is saved up: a step lasts no longer because those before it were short."""
        step_s = max(step_s, TICK_S)
        self._account.earn(step_s, most_s=SHARE * step_s)


def _num_running(running: Iterable[Sequence]) -> Counter[str]:
    """Of each request that came with several sequences."""
    return Counter(sequence.group for sequence in running if sequence.group)
