"""A recording of the engine's steps as Chrome trace JSON, which ui.perfetto.dev opens.

One track has the steps and, inside each, where its time went, down to the operations of the native
backend; every request has a track of its own with queue, prefill and decode; counters show how full
the engine was. No token and no text is in it. While nothing records, a step pays one comparison
with None in a few places.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.state.batch import ScheduledBatch
    from octavo_engine.state.outputs import EngineStats, SequenceOutput

MAX_EVENTS = 300_000  # then recording stops: about 60 MB, some minutes of steps
_PID, _STEPS_TID = 1, 1

Event = dict[str, Any]


class Laps:
    """Where the time of the step at hand goes: a mark ends the phase that it names."""

    __slots__ = ("_clock_ns", "_last_ns", "inside", "phases")

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._last_ns = 0
        self.phases: list[tuple[str, int, int]] = []  # name, begin, end
        self.inside: list[tuple[str, int, int, Event]] = []  # of phases: the backend's operations

    def start(self) -> int:
        self.phases, self.inside = [], []
        self._last_ns = self._clock_ns()
        return self._last_ns

    def mark(self, name: str) -> int:
        now_ns = self._clock_ns()
        self.phases.append((name, self._last_ns, now_ns))
        self._last_ns = now_ns
        return now_ns


@runtime_checkable
class Lapped(Protocol):
    """A backend that reports the phases of its own work, where laps are given."""

    laps: Laps | None


class StepProfile:
    """Records until it is written. Belongs to the thread that steps."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        *,
        max_events: int = MAX_EVENTS,
    ) -> None:
        self.laps = Laps(clock_ns)
        self.num_steps = 0
        self.is_truncated = False
        self._clock_ns = clock_ns
        self._began_ns = clock_ns()
        self._step_ns = self._began_ns
        self._is_step_fresh = False  # not sent yet
        self._max_events = max_events
        self._events: list[Event] = []
        self._phases: dict[str, str] = {}  # of requests: what each does now

    # ── called by the engine ──

    def start_step(self) -> None:
        self._step_ns = self.laps.start()

    def end_step(
        self, batch: ScheduledBatch, outputs: Sequence[SequenceOutput], stats: EngineStats
    ) -> None:
        """The last phase was marked; the engine reports the step from here on."""
        for sequence in batch.sequences:
            if sequence.request_id not in self._phases:  # it ran before the recording began
                self._enter(sequence.request_id, "decode", self._step_ns)
        phases = self.laps.phases
        scheduled_ns = phases[0][2] if phases else self._step_ns  # some came in line just before
        for sequence in batch.admitted:
            self._enter(sequence.request_id, "prefill", scheduled_ns)
        num_decodes = batch.num_decodes
        self._end_step(
            stats,
            sequences=len(batch.sequences),
            tokens=batch.num_tokens,
            decodes=num_decodes,
            prefill_tokens=batch.num_tokens - num_decodes,
            admitted=len(batch.admitted),
        )
        now_ns = self._clock_ns()
        for output in outputs:
            if output.finish_reason is not None:
                self.leave(output.request_id)
            elif output.token_ids and self._phases.get(output.request_id) != "decode":
                self._enter(output.request_id, "decode", now_ns)

    def end_pooling_step(self, texts: int, tokens: int, stats: EngineStats) -> None:
        self._end_step(stats, texts=texts, tokens=tokens)

    def waits(self, request_id: str) -> None:
        """It was taken in."""
        self._enter(request_id, "queue", self._clock_ns())

    def leave(self, request_id: str) -> None:
        """It has ended; unknown ones too."""
        phase = self._phases.pop(request_id, None)
        if phase is not None:
            self._async("e", request_id, phase, self._clock_ns())

    def sent(self) -> None:
        """The core's message is sent; of interest after a step."""
        if not self._is_step_fresh:
            return
        self._is_step_fresh = False
        end_ns = self.laps.mark("send")
        name, begin_ns, _ = self.laps.phases.pop()
        if not self.is_truncated:
            self._slice(name, begin_ns, end_ns)

    # ── what comes of it ──

    def write(self, path: str | Path) -> int:
        """How many events the file holds. Raises ConfigError. A name that ends in .gz is packed."""
        end_ns = self._clock_ns()
        for request_id in list(self._phases):
            self._async("e", request_id, self._phases.pop(request_id), end_ns)
        events = [*self._names(), *self._events]
        trace = {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"steps": self.num_steps, "is_truncated": self.is_truncated},
        }
        data = json.dumps(trace, separators=(",", ":")).encode()
        try:
            Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)
        except OSError as error:
            raise ConfigError(f"the profile cannot be written to {path}: {error}") from error
        return len(events)

    # ── inside ──

    def _end_step(self, stats: EngineStats, **args: int) -> None:
        self.num_steps += 1
        self._is_step_fresh = True
        if len(self._events) >= self._max_events:
            self.is_truncated = True
            return
        phases = self.laps.phases
        end_ns = phases[-1][2] if phases else self._clock_ns()
        self._slice("step", self._step_ns, end_ns, args)
        for name, begin, end in phases:
            self._slice(name, begin, end)
        # Operations are many: they leave room for the steps that come after.
        if len(self._events) < self._max_events // 2:
            for name, begin, end, args in self.laps.inside:
                self._slice(name, begin, end, args)
        self._count("sequences", end_ns, running=stats.num_running, waiting=stats.num_waiting)
        self._count("KV blocks", end_ns, used=stats.kv_blocks_used)

    def _enter(self, request_id: str, phase: str, at_ns: int) -> None:
        before = self._phases.get(request_id)
        if before is not None:
            self._async("e", request_id, before, at_ns)
        self._phases[request_id] = phase
        self._async("b", request_id, phase, at_ns)

    def _async(self, kind: str, request_id: str, phase: str, at_ns: int) -> None:
        # Ends are always kept: what began must end, or the viewer draws it without end.
        if kind == "b" and len(self._events) >= self._max_events:
            self._phases.pop(request_id, None)
            return
        self._events.append(
            {
                "ph": kind, "cat": "request", "name": phase, "id": request_id,
                "pid": _PID, "tid": _STEPS_TID, "ts": self._us(at_ns),
            }
        )  # fmt: skip

    def _slice(self, name: str, begin_ns: int, end_ns: int, args: Event | None = None) -> None:
        event: Event = {
            "ph": "X", "cat": "step", "name": name, "pid": _PID, "tid": _STEPS_TID,
            "ts": self._us(begin_ns), "dur": (end_ns - begin_ns) / 1e3,
        }  # fmt: skip
        if args:
            event["args"] = args
        self._events.append(event)

    def _count(self, name: str, at_ns: int, **values: int) -> None:
        self._events.append(
            {"ph": "C", "name": name, "pid": _PID, "ts": self._us(at_ns), "args": values}
        )

    def _names(self) -> list[Event]:
        return [
            {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": "octavo engine"}},
            {
                "ph": "M", "name": "thread_name", "pid": _PID, "tid": _STEPS_TID,
                "args": {"name": "step loop"},
            },
        ]  # fmt: skip

    def _us(self, at_ns: int) -> float:
        return (at_ns - self._began_ns) / 1e3
