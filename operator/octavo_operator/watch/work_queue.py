"""Keys to reconcile: coalesced, serial per key, with back-off and a jittered resync.

`Schedule` decides from the times it is passed; `WorkQueue` is its thin asyncio shell. A key that
fails waits longer each time and delays no other key.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable
    from random import Random

    from octavo_operator.metrics import OperatorMetrics, Outcome

K = TypeVar("K", bound="Hashable")
logger = logging.getLogger("octavo.operator.queue")


@dataclass(frozen=True, slots=True)
class Pace:
    """How soon a key is reconciled again."""

    least_gap_s: float = 0.1  # between two reconciles of a key: a burst of events is one reconcile
    first_retry_s: float = 0.5
    longest_retry_s: float = 120.0
    resync_s: float = 300.0  # also without any event
    resync_jitter: float = 0.2  # share of resync_s, so that a thousand keys do not march in step


class Schedule(Generic[K]):
    """When each key is due. A key is in one place at most: waiting, or being worked on."""

    def __init__(self, pace: Pace, rng: Random) -> None:
        self._pace = pace
        self._rng = rng
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._number = 0
        self._working: set[K] = set()
        self._again: dict[K, float] = {}  # added while being worked on
        self._not_before: dict[K, float] = {}
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        """Keys that are due but have no worker yet are counted too."""
        return len(self._due)

    @property
    def num_working(self) -> int:
        return len(self._working)

    def add(self, key: K, now: float, *, after_s: float = 0.0) -> None:
        """Reconcile this key; an earlier date wins."""
        at = max(now + after_s, self._not_before.get(key, 0.0))
        if key in self._working:
            self._again[key] = min(at, self._again.get(key, at))
        elif at < self._due.get(key, float("inf")):
            self._push(key, at)

    def take(self, now: float) -> K | None:
        """A key that is due; its owner must call `done`, `failed` or `forget`."""
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:  # moved to an earlier date since
                continue
            del self._due[key]
            self._working.add(key)
            return key
        return None

    def next_due(self) -> float | None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def done(self, key: K, now: float, *, again_after_s: float | None = None) -> None:
        self._failures.pop(key, None)
        jitter = 1 + self._pace.resync_jitter * (2 * self._rng.random() - 1)
        after_s = self._pace.resync_s * jitter
        if again_after_s is not None:
            after_s = min(after_s, again_after_s)
        self._not_before[key] = now + self._pace.least_gap_s
        self._release(key, now + after_s)

    def failed(self, key: K, now: float, *, retry_after_s: float | None = None) -> float:
        """Back off: doubling, jittered. Events do not shorten it below the first delay."""
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        longest = self._pace.longest_retry_s
        delay_s = min(longest, self._pace.first_retry_s * 2.0 ** min(failures - 1, 30))
        delay_s = max(delay_s * (0.8 + 0.4 * self._rng.random()), retry_after_s or 0.0)
        delay_s = min(delay_s, longest)
        # A changed spec is looked at soon; a storm of events about a broken object is not.
        self._not_before[key] = now + min(delay_s, 5.0)
        self._release(key, now + delay_s)
        return delay_s

    def forget(self, key: K, now: float) -> None:
        """The object is gone."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._working.discard(key)
        if (at := self._again.pop(key, None)) is not None:
            self._push(key, max(at, now))

    def _release(self, key: K, at: float) -> None:
        self._working.discard(key)
        again_at = self._again.pop(key, None)
        if again_at is not None:
            at = min(at, max(again_at, self._not_before.get(key, 0.0)))
        self._push(key, at)

    def _push(self, key: K, at: float) -> None:
        self._due[key] = at
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, key))


@dataclass(frozen=True, slots=True)
class KeyOutcome:
    """How the reconcile of a key ended."""

    is_gone: bool = False
    is_failed: bool = False
    again_after_s: float | None = None

    @property
    def name(self) -> Outcome:
        """As it is counted."""
        return "gone" if self.is_gone else "failed" if self.is_failed else "done"


class WorkQueue(Generic[K]):
    """Runs `work` for due keys, a few at a time."""

    def __init__(
        self,
        work: Callable[[K], Awaitable[KeyOutcome]],
        schedule: Schedule[K],
        *,
        clock: Callable[[], float],
        metrics: OperatorMetrics,
        num_workers: int = 8,
    ) -> None:
        self._work = work
        self._schedule = schedule
        self._clock = clock
        self._metrics = metrics
        self._num_workers = num_workers
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._schedule)

    def add(self, key: K, *, after_s: float = 0.0) -> None:
        self._schedule.add(key, self._clock(), after_s=after_s)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._num_workers):
                tasks.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            key = self._schedule.take(self._clock())
            self._metrics.queue_depth = len(self._schedule)
            if key is None:
                await self._wait()
                continue
            await self._reconcile(key)

    async def _reconcile(self, key: K) -> None:
        began_at = self._clock()
        try:
            outcome = await self._work(key)
        except Exception:
            # A bug of ours: loud, counted, and confined to this key.
            logger.exception("Failed to reconcile", extra={"key": str(key)})
            self._metrics.bugs += 1
            outcome = KeyOutcome(is_failed=True)
        now = self._clock()
        if outcome.is_gone:
            self._schedule.forget(key, now)
        elif outcome.is_failed:
            self._schedule.failed(key, now, retry_after_s=outcome.again_after_s)
        else:
            self._schedule.done(key, now, again_after_s=outcome.again_after_s)
        self._metrics.reconciled(outcome.name, now - began_at)
        self._changed.set()

    async def _wait(self) -> None:
        due = self._schedule.next_due()
        self._changed.clear()
        timeout_s = None if due is None else max(0.0, due - self._clock())
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
