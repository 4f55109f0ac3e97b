"""Steps launched ahead: while a batch computes, the next one is planned, built and sent behind it,
so that the device finds its next work before it is done with the last. On a pipeline there are as
many under way as it has stages.

     host    plan 1 ─ launch 1 ─ plan 2 ─ launch 2 ─ wait for 1 ─ report 1 ─ plan 3 ─ launch 3 ─ …
     device             └─ compute 1 ──────────────────┘└─ compute 2 ─────────────────┘└─ …

Where the next batch depends on the tokens of the one under way, that one is reported first and the
step is as if there were no such thing; what may be planned ahead is `scheduling.ahead`'s to say.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.scheduling import ahead

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.core.process.heartbeat import Heartbeat
    from octavo_engine.executor.executor import LaunchesBatches, UnderWay
    from octavo_engine.profile import Laps
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import SequenceOutput


class Flight(NamedTuple):
    """A batch between its launch and its report."""

    batch: ScheduledBatch
    under_way: UnderWay
    launched_at: float


class Ahead:
    """The turns of an engine whose executor launches without waiting."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: LaunchesBatches,
        heartbeat: Heartbeat,
        *,
        max_under_way: int = 2,
        now: Callable[[], float],
    ) -> None:
        """`max_under_way`: batches launched and not reported, the one to be reported included."""
        self.laps: Laps | None = None  # while steps are recorded
        # Called after each report, before anything is planned that may take its blocks.
        self.when_reported: Callable[[], None] | None = None
        self._scheduler = scheduler
        self._executor = executor
        self._heartbeat = heartbeat
        self._now = now
        self._max_under_way = max_under_way
        self._flights: deque[Flight] = deque()
        self._planned: ScheduledBatch | None = None  # and not launched yet
        self._landed_at = 0.0  # the last one
        self.num_landed = 0

    def __bool__(self) -> bool:
        """Whether anything is under way."""
        return bool(self._flights)

    def turn(self, outputs: list[SequenceOutput]) -> ScheduledBatch:
        """Launch the next batch, then add what came of the oldest if there are as many under way as
        there may be. Returns what was launched, which is empty when there is nothing to do."""
        # First of all: which sequences give way depends on it, and none under way can.
        now = self._scheduler.expire()
        while self._flights and not self._scheduler.can_plan_ahead():
            self._report(outputs)
            now = self._scheduler.expire()
        try:
            batch = self._planned = self._scheduler.schedule(now)
            self._mark("schedule")
            self._expect(batch)  # a launch may wait for the device, and so for those before it
            launched_at = self._now()
            under_way = None if batch.is_empty else self._executor.launch(batch)
        except Exception:
            while self._flights:  # those are not to blame, and their tokens are wanted
                self._report(outputs)
            raise
        if not batch.is_empty:
            ahead.launch(batch)
            self._flights.append(Flight(batch, under_way, launched_at))
        self._planned = None
        if len(self._flights) >= (1 if batch.is_empty else self._max_under_way):
            self._report(outputs)
        return batch

    def drop(self) -> list[ScheduledBatch]:
        """Give up all that is planned or under way, because something failed; oldest first."""
        batches = [flight.batch for flight in self._flights]
        if self._planned is not None:
            batches.append(self._planned)
        self._flights.clear()
        self._planned = None
        return batches

    def _report(self, outputs: list[SequenceOutput]) -> None:
        """Wait for the oldest batch under way and take its tokens in."""
        batch, under_way, launched_at = self._flights[0]
        self._expect()
        result = self._executor.land(under_way)
        landed_at = self._now()
        # It began when it was launched, or when the device was done with the batch before.
        step_s = landed_at - max(launched_at, self._landed_at)
        self._landed_at = landed_at
        self._mark("results")
        self._flights.popleft()
        self.num_landed += 1
        ahead.land(batch)
        outputs += self._scheduler.update(batch, result, step_s)
        if self.when_reported is not None:
            self.when_reported()
        self._mark("update")

    def _expect(self, *batches: ScheduledBatch) -> None:
        """The turn takes as long as these and all that is under way, at most."""
        everything = (*(flight.batch for flight in self._flights), *batches)
        self._heartbeat.expect(sum(self._scheduler.expected_s(batch) for batch in everything))

    def _mark(self, phase: str) -> None:
        if self.laps is not None:
            self.laps.mark(phase)
