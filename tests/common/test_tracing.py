"""A caller's trace goes on with us, and whatever is no trace counts as absent."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from octavo_common.tracing import (
    TraceParent,
    format_traceparent,
    known_attributes,
    make_exporter,
    make_provider,
    parent_context,
    parse_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "text",
    [
        "", "00", PARENT.upper(), PARENT[:-1], PARENT + "-x", f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", "x" * 10_000,
    ],
)  # fmt: skip
def test_a_traceparent_that_is_none_counts_as_absent(text):
    assert parse_traceparent(text) is None


def test_traceparents_of_now_and_of_later_versions():
    parent = TraceParent(int(TRACE, 16), int(SPAN, 16), 1)
    assert parse_traceparent(PARENT) == parent
    assert parse_traceparent(PARENT.replace("00-", "01-", 1) + "-more") == parent


def test_a_parent_is_passed_on_as_it_came():
    trace = pytest.importorskip("opentelemetry.trace")
    span = trace.get_current_span(parent_context(PARENT))
    assert format_traceparent(span) == PARENT


def test_without_a_parent_a_trace_begins_whatever_else_is_current():
    trace = pytest.importorskip("opentelemetry.trace")
    current = trace.get_current_span(parent_context(PARENT))
    with trace.use_span(current):
        below = trace.get_current_span(parent_context("none"))
    assert not below.get_span_context().is_valid


def test_spans_say_whose_they_are_and_the_callers_decision_holds():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    spans = memory.InMemorySpanExporter()
    provider = make_provider(
        export.SimpleSpanProcessor(spans), "octavo-x", sample_ratio=0.0, version="", instance="i"
    )
    tracer = provider.get_tracer("x")
    for flags in ("00", "01"):
        tracer.start_span("x", parent_context(f"00-{TRACE}-{SPAN}-{flags}")).end()
    tracer.start_span("x", parent_context("")).end()
    (span,) = spans.get_finished_spans()
    assert span.context.trace_id == int(TRACE, 16)
    assert span.resource.attributes["service.name"] == "octavo-x"
    assert span.resource.attributes["service.instance.id"] == "i"
    assert "service.version" not in span.resource.attributes


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://", "ftp://collector", "x"])
def test_a_collector_that_is_no_url(endpoint):
    with pytest.raises(ValueError, match=r"is no http\(s\):// URL of a collector"):
        make_exporter(endpoint)


@pytest.mark.parametrize(
    ("path", "requested"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/own/path", "/own/path")]
)
def test_a_collector_without_a_path_gets_the_usual_one(path, requested):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    paths: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            processor = make_exporter(f"http://127.0.0.1:{server.server_port}{path}")
            provider = make_provider(processor, "x", sample_ratio=1.0, version="", instance="")
            provider.get_tracer("x").start_span("x").end()
            provider.shutdown()
        finally:
            server.shutdown()
            thread.join()
    assert paths == [requested]


def test_what_is_not_known_is_no_attribute():
    assert known_attributes({"a": 0, "b": None, "c": "", "d": False}) == {"a": 0, "d": False}
