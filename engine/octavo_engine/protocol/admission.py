"""Admission under overload: whether a request that must wait can still be served in time.

A router and an engine have a queue each, and decide by the same three measurements:

    QueueRate      how fast the queue moves while requests wait in it
    ServiceTime    how long answers take from their turn to their end, at the least
    Patience       after how long clients leave

    forecast.shortfall_s(...)  on arrival: by how many seconds it would come too late; <= 0: admit
    forecast.is_late(...)      at its turn: its answer would come too late
    forecast.is_overdue(...)   at its turn: others had better go first

What was never measured refuses no request, and an empty queue takes one: so there is always one
to measure. A long queue serves no more clients than a short one does, and
is wrong about more of them: so half of the time that they have beside their answers is what may be
waited, and half of their patience. Pure: times are arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_right

MAX_RETRY_AFTER_S = 30.0
MIN_PATIENCE_S = 1.0  # clients that leave sooner do not shorten the queue further

_SHARE = 0.5  # of the time there is, that may be spent in the queue
_SLACK = 1.5  # a wait may turn out longer by this factor before others go first
_MEMORY_S = 15.0  # of the queue's rate; of time in which requests wait
_MEMORY_GAPS = 8.0  # or so many gaps between turns, if that is longer
_MIN_TURNS = 3  # moments with turns before there is a rate
_MIN_ANSWERS = 8  # before service times are known
_WEIGHT = 0.05  # of one more answer
_HALF_LIFE_S = 60.0  # of what clients showed of their patience
_MIN_CLIENTS = 8.0  # that waited so long, before those who left mean anything
_LEAVERS = 0.25  # a share of clients that leave: the others' patience is not waited for
_EDGES_S = tuple(0.5 * 2 ** (step / 4) for step in range(40))  # 0.5 s to 7 min


class QueueRate:
    """Work that leaves a queue for service, a second, over the time in which requests wait.

    Work is in any unit. Time in which none waits says nothing of how fast a queue would move. A
    silence counts as long as it lasts; afterwards it weighs no more than a few usual gaps.
    """

    __slots__ = ("_at", "_gap", "_num_turns", "_open_s", "_seconds", "_work")

    def __init__(self) -> None:
        self._work = self._seconds = 0.0  # fading
        self._gap = 0.0  # between moments with turns, on average
        self._num_turns = 0  # such moments
        self._open_s = 0.0  # waited since the last of them
        self._at: float | None = None  # counted up to here; None: none waits

    def waits(self, now: float, *, is_waiting: bool) -> None:
        """Whether requests wait from now on."""
        if self._at is not None:
            self._open_s += now - self._at
        self._at = now if is_waiting else None

    def took(self, work: float, now: float) -> None:
        """One went from the queue to its service; before `waits` says that none is left."""
        if self._at is None:
            return
        self.waits(now, is_waiting=True)
        gap, self._open_s = self._open_s, 0.0
        if gap > 0.0:
            if self._num_turns >= _MIN_TURNS:
                gap = min(gap, max(2.0, _MEMORY_GAPS * self._gap))
            self._num_turns += 1
            self._gap += (gap - self._gap) / min(self._num_turns, _MEMORY_GAPS)
            keep = math.exp(-gap / max(_MEMORY_S, _MEMORY_GAPS * self._gap))
            self._work *= keep
            self._seconds = self._seconds * keep + gap
        self._work += work

    def wait_s(self, work: float, now: float) -> float:
        """How long so much work ahead will take; 0 while that is not known."""
        if self._num_turns < _MIN_TURNS or self._work <= 0.0:
            return 0.0
        silence = self._open_s + (now - self._at if self._at is not None else 0.0)
        return work * (self._seconds + silence) / self._work


class _Spread:
    """A running mean, and how far values are from it."""

    __slots__ = ("_deviation", "count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = self._deviation = 0.0

    def observe(self, value: float) -> None:
        self.count += 1
        weight = max(_WEIGHT, 1.0 / self.count)
        self._deviation += weight * (abs(value - self.mean) - self._deviation)
        self.mean += weight * (value - self.mean)
        if self.count == 1:
            self._deviation = 0.0

    @property
    def low(self) -> float:
        """Few are below it."""
        return max(0.0, self.mean - 2.0 * self._deviation)


class ServiceTime:
    """How long answers take: seconds for a token, and the share of their limit that they use."""

    __slots__ = ("_share", "_token_s")

    def __init__(self) -> None:
        self._token_s, self._share = _Spread(), _Spread()

    def observe(self, seconds: float, *, tokens: int, max_tokens: int) -> None:
        """An answer that came to its end."""
        if tokens > 0:
            self._token_s.observe(seconds / tokens)
            self._share.observe(min(1.0, tokens / max(max_tokens, 1)))

    def usual_tokens(self, max_tokens: float) -> float:
        """That answers with such a limit have on average; all while that is not known."""
        return max_tokens * (self._share.mean if self._share.count else 1.0)

    def least_s(self, max_tokens: int) -> float:
        """Few such answers take less; 0 while that is not known."""
        if self._token_s.count < _MIN_ANSWERS:
            return 0.0
        return self._token_s.low * max(1.0, self._share.low * max_tokens)


class ClientPatience:
    """After how long clients leave whose answers are not at their end: a life table, fading."""

    __slots__ = ("_at", "_left", "_stayed")

    def __init__(self) -> None:
        self._stayed = [0.0] * len(_EDGES_S)  # clients that were there beyond the span
        self._left = [0.0] * len(_EDGES_S)  # that left within it
        self._at = 0.0

    def note(self, waited_s: float, now: float, *, has_left: bool) -> None:
        """A client's answer came to its end so long after it was requested, or the client left."""
        self._fade(now)
        span = bisect_right(_EDGES_S, waited_s) - 1  # -1: at once, which says nothing
        for passed in range(span):
            self._stayed[passed] += 1.0
        if has_left and span >= 0:
            self._left[span] += 1.0

    def seconds(self, now: float) -> float:
        """For so long most clients wait; infinite while they were not seen to leave."""
        self._fade(now)
        staying = 1.0
        for edge_s, stayed, left in zip(_EDGES_S, self._stayed, self._left, strict=True):
            if stayed + left >= _MIN_CLIENTS:
                staying *= stayed / (stayed + left)
            if staying < 1.0 - _LEAVERS:
                return edge_s
        return math.inf

    def _fade(self, now: float) -> None:
        since = now - self._at
        if since < 1.0:
            return
        self._at = now
        keep = 0.5 ** (since / _HALF_LIFE_S)
        self._stayed = [keep * count for count in self._stayed]
        self._left = [keep * count for count in self._left]


class Forecast:
    """All of it, for one queue."""

    __slots__ = ("patience", "rate", "service")

    def __init__(self) -> None:
        self.rate, self.service, self.patience = QueueRate(), ServiceTime(), ClientPatience()

    def shortfall_s(
        self,
        now: float,
        *,
        work_ahead: float,
        max_wait_s: float,  # as it was configured; infinite: only deadlines count
        time_left_s: float = math.inf,  # to its deadline
        max_tokens: int = 0,  # of its answer
        is_whole: bool = False,  # nothing of the answer is seen before its end
    ) -> float:
        """By how much one that comes now would begin, or be done, too late; <= 0: it may wait."""
        wait_s = self.rate.wait_s(work_ahead, now)
        if wait_s <= 0.0:
            return 0.0
        service_s = self.service.least_s(max_tokens)
        longest_s = max_wait_s
        if not math.isinf(max_wait_s):
            longest_s = min(max_wait_s, self.longest_wait_s(now))
        if is_whole and not math.isinf(max_wait_s):
            waiting_s = _SHARE * (self.patience.seconds(now) - service_s)
            longest_s = min(longest_s, max(MIN_PATIENCE_S, waiting_s))
        return max(wait_s - longest_s, wait_s / _SHARE + service_s - time_left_s)

    def is_late(self, now: float, *, deadline: float, max_tokens: int) -> bool:
        """One whose turn has come would not be done by its deadline."""
        return now + self.service.least_s(max_tokens) > deadline

    def is_overdue(self, now: float, *, since: float) -> bool:
        """It came when clients seemed more patient, and has waited too long since: so many are
        about to leave that others had better go first."""
        return now - since > _SLACK * self.longest_wait_s(now)

    def longest_wait_s(self, now: float) -> float:
        """That clients have the patience for; infinite while they were not seen to leave."""
        return max(MIN_PATIENCE_S, _SHARE * self.patience.seconds(now))


def retry_after_s(shortfall_s: float) -> float:
    """When the queue would be short enough if no request joined it."""
    return min(max(1.0, shortfall_s), MAX_RETRY_AFTER_S)
