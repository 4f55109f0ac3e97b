"""OpenTelemetry as engine and router use it: parents from headers, a tracer, and its export.

OpenTelemetry is imported by the functions that need it: without a collector nothing of it exists.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

T = TypeVar("T")

OTLP_PATH = "/v1/traces"
# gen_ai.operation.name, by route.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
}
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceParent(NamedTuple):
    """The caller's span."""

    trace: int
    span: int
    flags: int


def parse_traceparent(text: str) -> TraceParent | None:
    """W3C Trace Context; None for whatever is none, which then counts as absent."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    is_known = version == "00"
    if version == "ff" or (is_known and more) or not int(trace, 16) or not int(span, 16):
        return None
    return TraceParent(int(trace, 16), int(span, 16), int(flags, 16))


def format_traceparent(span: Span) -> str:
    """For whom we call next."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def parent_context(traceparent: str) -> Context:
    """What a request's first span hangs below."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    parent = parse_traceparent(traceparent)
    if parent is None:
        return Context()  # a trace of its own, whatever else runs in this process
    flags = TraceFlags(parent.flags & 1)
    remote = SpanContext(parent.trace, parent.span, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())


def make_exporter(endpoint: str) -> SpanProcessor:
    """Sends spans in batches. Raises ValueError for what is no URL, ImportError without the
    packages."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{endpoint!r} is no http(s):// URL of a collector")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    target = endpoint if url.path.strip("/") else endpoint.rstrip("/") + OTLP_PATH
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=target))


def make_provider(
    processor: SpanProcessor, service: str, *, sample_ratio: float, version: str, instance: str
) -> TracerProvider:
    """A caller's decision to sample holds; requests without one are sampled by the ratio."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    names = {
        "service.name": service,
        "service.version": version,
        "service.instance.id": instance,
    }
    resource = Resource.create({key: value for key, value in names.items() if value})
    sampler = ParentBased(TraceIdRatioBased(sample_ratio))
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def known_attributes(attributes: Mapping[str, T | None]) -> dict[str, T]:
    """Without those that are None or empty."""
    return {key: value for key, value in attributes.items() if value is not None and value != ""}


def mark_failed(span: Span, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, reason))
    span.set_attribute("error.type", reason)
