"""OpenTelemetry spans of a request: the whole, its wait, its prefill, its decoding.

    POST /v1/chat/completions    server span; the caller's traceparent is its parent
    ├── queue                    from arrival to the first step
    ├── prefill                  to the first token
    └── decode                   to the last one, of all answers

Of several prompts or answers the first one that speaks sets the times of queue and prefill. Names
follow the GenAI conventions. No prompt, no answer, no key is ever an attribute. Without a collector
nothing of this exists.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_common.tracing import (
    OPERATIONS,
    known_attributes,
    make_exporter,
    make_provider,
    mark_failed,
    parent_context,
)
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

SERVICE_NAME = "octavo-engine"
_CURRENT: ContextVar[EngineTrace | None] = ContextVar("octavo_trace", default=None)

Value = str | int | float | bool | list[str]


@dataclass(slots=True)
class RequestTimeline:
    """What is learned of a request while it runs. Times are those of `time.monotonic`; 0: never."""

    arrived_at: float = 0.0
    started_at: float = 0.0  # of its first step
    first_at: float = 0.0  # of its first token
    last_at: float = 0.0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    request: dict[str, Value] = field(default_factory=dict)  # gen_ai.request.*


def current() -> EngineTrace | None:
    """Of the request that this task works for, if it is traced."""
    return _CURRENT.get()


def make_tracing(
    endpoint: str, *, sample_ratio: float = 1.0, version: str = "", instance: str = ""
) -> EngineTracing | None:
    """None where no collector is configured. Raises ConfigError."""
    if not endpoint:
        return None
    try:
        processor = make_exporter(endpoint)
    except ValueError as error:
        raise ConfigError(f"--otlp-endpoint: {error}") from None
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs opentelemetry-sdk and its OTLP exporter ({error}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    return EngineTracing(processor, sample_ratio=sample_ratio, version=version, instance=instance)


class EngineTracing:
    """Makes an `EngineTrace` for each request. `close` sends what is left."""

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        sample_ratio: float = 1.0,
        version: str = "",
        instance: str = "",
        now: Callable[[], float] = time.monotonic,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._provider = make_provider(
            processor, SERVICE_NAME, sample_ratio=sample_ratio, version=version, instance=instance
        )
        self._tracer: Tracer = self._provider.get_tracer("octavo_engine", version)
        self._now = now
        self._clock_ns = clock_ns

    def begin(self, method: str, route: str, *, traceparent: str = "") -> EngineTrace:
        """It is `current` for this task and those it starts."""
        trace = EngineTrace(
            self._tracer, f"{method} {route}", route, traceparent, self._now, self._clock_ns
        )
        _CURRENT.set(trace)
        return trace

    def close(self) -> None:
        """Blocks for as long as the collector takes, some seconds at most."""
        self._provider.shutdown()


class EngineTrace:
    """One request's spans; `timeline` is filled in by the parts that handle it."""

    def __init__(
        self, tracer: Tracer, name: str, route: str, traceparent: str,
        now: Callable[[], float], clock_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        from opentelemetry.trace import SpanKind, set_span_in_context

        self.timeline = RequestTimeline()
        self._tracer = tracer
        self._route = route
        self._now = now
        # Two clocks read at one moment: steps are timed by the one that never jumps.
        self._began_at, self._began_ns = now(), clock_ns()
        self._root = tracer.start_span(
            name,
            context=parent_context(traceparent),
            kind=SpanKind.SERVER,
            start_time=self._began_ns,
        )
        self._below = set_span_in_context(self._root)

    @property
    def is_sampled(self) -> bool:
        return self._root.is_recording()

    @property
    def trace_id(self) -> str:
        return f"{self._root.get_span_context().trace_id:032x}"

    def finish(self, status: int, more: Mapping[str, Value | None], error: str = "") -> None:
        """The exchange is over; `error` says why, if it failed through no fault of its client."""
        end_ns = self._ns(self._now())
        root = self._root
        if root.is_recording():
            self._add_children(end_ns)
            root.set_attributes(self._attributes(status, more))
            if self.timeline.first_at:
                root.add_event("gen_ai.first_token", timestamp=self._ns(self.timeline.first_at))
            if error or status >= 500:
                mark_failed(root, error or str(status))
        root.end(end_ns)

    def _add_children(self, end_ns: int) -> None:
        """Phases that were never reached leave no span; the one it ended in ends with it."""
        times = self.timeline
        moments = (
            ("queue", times.arrived_at, times.started_at),
            ("prefill", times.started_at, times.first_at),
            ("decode", times.first_at, times.last_at),
        )
        for name, begin, end in moments:
            if begin:
                span = self._tracer.start_span(name, self._below, start_time=self._ns(begin))
                span.end(self._ns(end) if end else end_ns)

    def _attributes(self, status: int, more: Mapping[str, Value | None]) -> dict[str, Value]:
        times = self.timeline
        known: dict[str, Value | None] = {
            "http.route": self._route,
            "http.response.status_code": status,
            "gen_ai.operation.name": OPERATIONS.get(self._route),
            "gen_ai.provider.name": "octavo",
            "gen_ai.usage.input_tokens": times.input_tokens or None,
            "gen_ai.usage.output_tokens": times.output_tokens or None,
            "gen_ai.response.finish_reasons": times.finish_reasons or None,
            "octavo.usage.cached_tokens": times.cached_tokens or None,
            **times.request,
            **more,
        }
        return known_attributes(known)

    def _ns(self, at: float) -> int:
        return self._began_ns + int((at - self._began_at) * 1e9)
