"""What an engine reports to its router: residency and load, merged and delayed as on a stream."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo_engine.protocol.stream import HEARTBEAT_S, Delta, Load
from octavo_engine.server.routers.push_stream import FLUSH_S, LOAD_S, SMOOTHING

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.study.timeline import Timeline
    from octavo_engine.scheduling.scheduler import Scheduler
    from octavo_engine.state.outputs import EngineStats


class Publisher:
    """Follows the cadence of the engine's stream: see octavo_engine.server.routers.push_stream."""

    def __init__(
        self,
        scheduler: Scheduler,
        timeline: Timeline,
        deliver: Callable[[Delta], None],
        *,
        delay_s: float,
        max_queue: int,
    ) -> None:
        self._scheduler = scheduler
        self._timeline = timeline
        self._deliver = deliver
        self._delay_s = delay_s
        self._max_queue = max_queue
        self._seq = 0
        self._step_s = 0.0
        self._load = Load()
        self._load_at = self._flushed_at = float("-inf")
        self._planned_at = float("inf")
        scheduler.kv.residency.watch(on=True)
        scheduler.kv.residency.take()  # the first snapshot: nothing is cached yet
        self._plan(timeline.now)

    def on_change(self, step_s: float = 0.0) -> None:
        """A step was done, which took so long, or an answer labelled."""
        if step_s:
            before = self._step_s or step_s
            self._step_s = before + SMOOTHING * (step_s - before)
        self._plan(self._flushed_at + FLUSH_S)

    def _plan(self, when: float) -> None:
        when = max(when, self._timeline.now)
        if self._planned_at <= when:
            return
        self._planned_at = when
        self._timeline.at(when, lambda: self._flush(when))

    def _flush(self, planned_at: float) -> None:
        if planned_at != self._planned_at:
            return  # something was due earlier, and planned what follows
        self._planned_at = float("inf")
        now = self._timeline.now
        change = self._scheduler.kv.residency.take()
        current = self._load_of(self._scheduler.stats())
        has_changed = replace(current, step_s=0.0) != replace(self._load, step_s=0.0)
        load = None
        if now >= self._load_at + (LOAD_S if has_changed else HEARTBEAT_S):
            load, self._load, self._load_at = current, current, now
        if change is not None or load is not None:
            self._seq += 1
            stored, evicted = (change.stored, change.evicted) if change is not None else (b"", b"")
            delta = Delta(self._seq, stored, evicted, load)
            self._timeline.after(self._delay_s, lambda: self._deliver(delta))
        self._flushed_at = now
        self._plan(self._load_at + (LOAD_S if has_changed and load is None else HEARTBEAT_S))

    def _load_of(self, stats: EngineStats) -> Load:
        return Load(
            running=stats.num_running,
            waiting=stats.num_waiting,
            queued_tokens=stats.queued_tokens,
            kv_usage=stats.kv_blocks_used / stats.kv_blocks_total,
            step_s=self._step_s,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            computed_tokens=stats.prompt_tokens - stats.prompt_tokens_cached,
            is_saturated=stats.num_waiting >= self._max_queue,
        )
