"""OpenTelemetry spans of a request: the whole, its wait, the decision, each attempt at an engine.

    POST /v1/chat/completions            server span; the client's traceparent is its parent
    ├── queue                            only if it waited
    ├── route                            which policy chose, how much it expects to be cached
    ├── attempt 1 10.0.0.7:8000          the engine's own spans hang below: it gets this span's id
    └── attempt 2 10.0.0.9:8000          a retry, or a resume in the middle of the answer

Names follow the GenAI conventions. No prompt, no answer, no key is ever an attribute. Without a
collector nothing of this exists, and a client's traceparent reaches the engine as it came.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo_common.tracing import (
    OPERATIONS,
    format_traceparent,
    known_attributes,
    make_exporter,
    make_provider,
    mark_failed,
    parent_context,
)
from octavo_router.errors import ConfigInvalid
from octavo_router.metrics.version import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

    from octavo_router.metrics import RequestRecord

SERVICE_NAME = "octavo-router"


def make_tracing(endpoint: str, *, sample_ratio: float, instance: str = "") -> RouterTracing | None:
    """None where no collector is configured. Raises ConfigInvalid."""
    if not endpoint:
        return None
    try:
        processor = make_exporter(endpoint)
    except ValueError as error:
        raise ConfigInvalid("tracing.endpoint", str(error)) from None
    except ImportError as error:
        problem = (
            f"needs opentelemetry-sdk and its OTLP exporter ({error}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        )
        raise ConfigInvalid("tracing.endpoint", problem) from error
    return RouterTracing(
        processor, sample_ratio=sample_ratio, version=installed_version(), instance=instance
    )


class RouterTracing:
    """Makes a `RouterTrace` for each request. `close` sends what is left."""

    def __init__(
        self,
        processor: SpanProcessor,
        *,
        sample_ratio: float = 1.0,
        version: str = "",
        instance: str = "",
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._provider = make_provider(
            processor, SERVICE_NAME, sample_ratio=sample_ratio, version=version, instance=instance
        )
        self._tracer: Tracer = self._provider.get_tracer("octavo_router", version)
        self._clock_ns = clock_ns

    def begin(self, record: RequestRecord) -> RouterTrace:
        """`record` has its route and the client's traceparent already."""
        return RouterTrace(self._tracer, record, self._clock_ns)

    def close(self) -> None:
        """Blocks for as long as the collector takes, some seconds at most."""
        self._provider.shutdown()


class RouterTrace:
    """One request's spans."""

    def __init__(self, tracer: Tracer, record: RequestRecord, clock_ns: Callable[[], int]) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer = tracer
        self._clock_ns = clock_ns
        self._began_ns = clock_ns()
        self._num_attempts = 0
        self._attempt: Span | None = None
        self._root = tracer.start_span(
            f"{record.method} {record.route}",
            context=parent_context(record.traceparent),
            kind=SpanKind.SERVER,
            start_time=self._began_ns,
        )
        self._below = set_span_in_context(self._root)

    @property
    def is_sampled(self) -> bool:
        return self._root.is_recording()

    def attempt(self, endpoint: str, *, is_resume: bool = False) -> str:
        """Another attempt begins; the one before has failed. The traceparent for the engine."""
        from opentelemetry.trace import SpanKind

        self.attempt_failed("")
        self._num_attempts += 1
        self._attempt = self._tracer.start_span(
            f"attempt {self._num_attempts} {endpoint}",
            context=self._below,
            kind=SpanKind.CLIENT,
            start_time=self._clock_ns(),
            attributes={
                "server.address": endpoint,
                "octavo.attempt": self._num_attempts,
                "octavo.is_resume": is_resume,
            },
        )
        return format_traceparent(self._attempt)

    def attempt_failed(self, reason: str) -> None:
        """Harmless when none is under way."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            mark_failed(attempt, reason or "lost")
            attempt.end(self._clock_ns())

    def finish(self, record: RequestRecord) -> None:
        """It is over: `record` has everything by now."""
        now_ns = self._clock_ns()
        if self._attempt is not None:
            if record.is_error:
                mark_failed(self._attempt, record.outcome)
            self._attempt.end(now_ns)
            self._attempt = None
        root = self._root
        if root.is_recording():
            self._add_children(record)
            root.set_attributes(_attributes(record))
            if record.ttft_s is not None:
                at_ns = self._began_ns + int(record.ttft_s * 1e9)
                root.add_event("gen_ai.first_token", timestamp=at_ns)
            if record.is_error:
                mark_failed(root, record.code or record.outcome)
        root.end(now_ns)

    def _add_children(self, record: RequestRecord) -> None:
        queued_ns = self._began_ns + int(record.queue_s * 1e9)
        if record.queue_s > 0.0:
            queue = self._tracer.start_span("queue", self._below, start_time=self._began_ns)
            queue.end(queued_ns)
        if record.attempts:
            chosen: dict[str, str | int] = {
                "octavo.policy": record.policy,
                "octavo.endpoint": record.endpoint,
                "octavo.pool": record.pool,
                "octavo.predicted_tokens": record.predicted_tokens,
            }
            route = self._tracer.start_span(
                "route", self._below, start_time=queued_ns, attributes=chosen
            )
            route.end(queued_ns + int(record.pick_s * 1e9))


def _attributes(record: RequestRecord) -> dict[str, str | int | bool]:
    known: dict[str, str | int | bool | None] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.operation.name": OPERATIONS.get(record.route),
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": record.model[:256],
        "gen_ai.usage.input_tokens": record.prompt_tokens or None,
        "gen_ai.usage.output_tokens": record.output_tokens or None,
        "octavo.usage.cached_tokens": record.cached_tokens,
        "octavo.request_id": record.request_id,
        "octavo.stream": record.is_stream,
        "octavo.tenant": record.tenant,
        "octavo.attempts": record.attempts,
        "octavo.resumes": record.resumes,
    }
    return known_attributes(known)
