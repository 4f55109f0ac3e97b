"""Spans of a request through the engine: their shape, what they say, what they never say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine import tracing
from octavo_engine.errors import ConfigError
from octavo_engine.tracing import (
    EngineTrace,
    EngineTracing,
    make_tracing,
)

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="traces need opentelemetry-sdk"
)
export = pytest.importorskip("opentelemetry.sdk.trace.export")

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
CHAT = "/v1/chat/completions"
EPOCH_NS = 10**18
S = 10**9


class Rig:
    """Tracing into memory; the clock moves when told."""

    def __init__(self, *, sample_ratio: float = 1.0) -> None:
        self.exporter: Any = memory.InMemorySpanExporter()
        self.now = 100.0
        self.tracing = EngineTracing(
            export.SimpleSpanProcessor(self.exporter),
            sample_ratio=sample_ratio,
            now=lambda: self.now,
            clock_ns=lambda: EPOCH_NS + int((self.now - 100.0) * S),
        )

    def begin(self, traceparent: str = PARENT) -> EngineTrace:
        return self.tracing.begin("POST", CHAT, traceparent=traceparent)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def times(self, name: str) -> tuple[float, float]:
        span = self.spans[name]
        assert span.start_time is not None and span.end_time is not None
        return (span.start_time - EPOCH_NS) / S, (span.end_time - EPOCH_NS) / S


def test_a_request_that_went_all_the_way():
    rig = Rig()
    trace = rig.begin()
    assert tracing.current() is trace
    times = trace.timeline
    times.arrived_at, times.started_at, times.first_at, times.last_at = 101.0, 103.0, 104.0, 108.0
    times.input_tokens, times.output_tokens, times.cached_tokens = 10, 5, 8
    times.finish_reasons = ["stop", "length"]
    times.request = {"gen_ai.request.temperature": 0.5}
    rig.now = 109.0
    trace.finish(200, {"gen_ai.request.model": "m", "octavo.nothing": None})

    root = rig.spans[f"POST {CHAT}"]
    assert root.context is not None and root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert {name: rig.times(name) for name in rig.spans} == {
        f"POST {CHAT}": (0, 9), "queue": (1, 3), "prefill": (3, 4), "decode": (4, 8),
    }  # fmt: skip
    for name in ("queue", "prefill", "decode"):
        parent = rig.spans[name].parent
        assert parent is not None and parent.span_id == root.context.span_id
    assert dict(root.attributes or {}) == {
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "octavo.usage.cached_tokens": 8,
    }
    (event,) = root.events
    assert (event.name, event.timestamp) == ("gen_ai.first_token", EPOCH_NS + 4 * S)


def test_one_that_ended_while_it_waited_has_no_other_phase():
    rig = Rig()
    trace = rig.begin()
    trace.timeline.arrived_at = 100.0
    rig.now = 102.0
    trace.finish(503, {}, "queue_full")
    assert set(rig.spans) == {f"POST {CHAT}", "queue"}
    assert rig.times("queue") == (0, 2)
    root = rig.spans[f"POST {CHAT}"]
    assert root.status.status_code.name == "ERROR"
    assert dict(root.attributes or {})["error.type"] == "queue_full"


def test_a_bad_request_is_no_failure_of_ours():
    rig = Rig()
    rig.begin().finish(400, {})
    assert rig.spans[f"POST {CHAT}"].status.status_code.name == "UNSET"


def test_who_is_not_sampled_leaves_nothing():
    rig = Rig()
    trace = rig.begin(f"00-{TRACE}-{SPAN}-00")
    assert not trace.is_sampled and trace.trace_id == TRACE
    trace.finish(200, {})
    assert rig.spans == {}


def test_a_request_without_a_parent_begins_a_trace_by_the_ratio():
    for ratio, is_sampled in ((1.0, True), (0.0, False)):
        assert Rig(sample_ratio=ratio).begin("").is_sampled is is_sampled


def test_no_collector_no_traces():
    assert make_tracing("") is None


def test_a_collector_that_is_no_url():
    with pytest.raises(ConfigError, match="otlp-endpoint"):
        make_tracing("collector:4318")
