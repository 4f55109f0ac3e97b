"""Spans of a request: their shape, their parents, what they say and what they never say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.errors import ConfigInvalid
from octavo_router.metrics import RequestRecord
from octavo_router.tracing import RouterTracing, make_tracing

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="traces need opentelemetry-sdk"
)
export = pytest.importorskip("opentelemetry.sdk.trace.export")

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
RECORD = RequestRecord(
    request_id="r1", route="/v1/chat/completions", model="m", pool="p", tenant="t",
    endpoint="10.0.0.2:8000", policy="prefix-load", status=200, outcome="ok", is_stream=True,
    duration_s=3.0, queue_s=1.0, pick_s=0.5, ttft_s=2.0, prompt_tokens=10, output_tokens=5,
    cached_tokens=8, predicted_tokens=7, attempts=1, traceparent=PARENT,
)  # fmt: skip


class Rig:
    """Tracing into memory, with a clock in nanoseconds that steps by one second."""

    def __init__(self, *, sample_ratio: float = 1.0) -> None:
        self.exporter: Any = memory.InMemorySpanExporter()
        self.now_s = 0
        processor = export.SimpleSpanProcessor(self.exporter)
        self.tracing = RouterTracing(processor, sample_ratio=sample_ratio, clock_ns=self._clock_ns)

    def _clock_ns(self) -> int:
        self.now_s += 1
        return self.now_s * 10**9

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def test_a_request_with_one_attempt():
    rig = Rig()
    trace = rig.tracing.begin(RECORD)
    sent = trace.attempt("10.0.0.2:8000")
    trace.finish(RECORD)
    root = rig.spans["POST /v1/chat/completions"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == SPAN
    attempt = rig.spans["attempt 1 10.0.0.2:8000"]
    assert sent == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    for name in ("queue", "route", attempt.name):
        parent = rig.spans[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "m"
    assert attributes["gen_ai.usage.input_tokens"] == 10
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["octavo.usage.cached_tokens"] == 8
    assert attributes["http.response.status_code"] == 200
    (event,) = root.events
    assert root.start_time is not None
    assert (event.name, event.timestamp - root.start_time) == ("gen_ai.first_token", 2 * 10**9)
    queue, route = rig.spans["queue"], rig.spans["route"]
    assert (queue.start_time, queue.end_time) == (root.start_time, root.start_time + 10**9)
    assert (route.start_time, route.end_time) == (queue.end_time, root.start_time + 1_500_000_000)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/batch"])
def test_chats_are_named_as_the_engine_names_them(path):
    rig = Rig()
    record = replace(RECORD, route=path)
    rig.tracing.begin(record).finish(record)
    attributes = dict(rig.spans[f"POST {path}"].attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"


def test_a_failed_attempt_and_a_resume():
    rig = Rig()
    trace = rig.tracing.begin(RECORD)
    first = trace.attempt("a:1")
    trace.attempt_failed("broken")
    second = trace.attempt("b:1", is_resume=True)
    assert first != second
    trace.finish(replace(RECORD, attempts=2, resumes=1))
    assert rig.spans["attempt 1 a:1"].status.status_code.name == "ERROR"
    assert dict(rig.spans["attempt 1 a:1"].attributes or {})["error.type"] == "broken"
    assert dict(rig.spans["attempt 2 b:1"].attributes or {})["octavo.is_resume"] is True
    assert rig.spans["POST /v1/chat/completions"].status.status_code.name == "UNSET"


def test_an_error_of_ours_marks_the_whole():
    rig = Rig()
    trace = rig.tracing.begin(RECORD)
    trace.finish(replace(RECORD, status=503, code="queue_full", attempts=0, queue_s=0.0))
    root = rig.spans["POST /v1/chat/completions"]
    assert root.status.status_code.name == "ERROR"
    assert dict(root.attributes or {})["error.type"] == "queue_full"
    assert set(rig.spans) == {root.name}  # it neither waited nor was placed


def test_who_is_not_sampled_is_passed_on_and_not_written_down():
    rig = Rig(sample_ratio=1.0)
    record = replace(RECORD, traceparent=f"00-{TRACE}-{SPAN}-00")
    trace = rig.tracing.begin(record)
    assert not trace.is_sampled
    assert trace.attempt("a:1").startswith(f"00-{TRACE}-")
    assert trace.attempt("a:1").endswith("-00")
    trace.finish(record)
    assert rig.spans == {}


def test_a_request_without_a_parent_begins_a_trace_by_the_ratio():
    orphan = replace(RECORD, traceparent="")
    for ratio, is_sampled in ((1.0, True), (0.0, False)):
        assert Rig(sample_ratio=ratio).tracing.begin(orphan).is_sampled is is_sampled


def test_no_collector_no_traces():
    assert make_tracing("", sample_ratio=1.0) is None


def test_a_collector_that_is_no_url():
    with pytest.raises(ConfigInvalid, match=r"tracing\.endpoint"):
        make_tracing("collector:4318", sample_ratio=1.0)
