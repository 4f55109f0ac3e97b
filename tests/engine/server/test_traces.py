"""Traces as a collector gets them from a real `octavo serve`, over OTLP."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.process import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Its URL, and the path and body of everything that was sent to it."""
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def value(pair: Any) -> Any:
    kind = pair.value.WhichOneof("value")
    if kind == "array_value":
        return [item.string_value for item in pair.value.array_value.values]
    return getattr(pair.value, kind)


@pytest.mark.slow
def test_a_chat_s_phases_reach_the_collector_and_its_words_do_not():
    chat = {
        "model": "m", "max_tokens": 5, "temperature": 0.25, "seed": 3, "stop": ["stop words"],
        "messages": [{"role": "user", "content": "secret words"}],
    }  # fmt: skip
    with (
        collector() as (url, received),
        serving("m", "--otlp-endpoint", url, env={"OCTAVO_POD_UID": "pod-7"}) as server,
    ):
        with server.client() as client:
            answer = client.post(
                "/v1/chat/completions",
                json=chat,
                headers={"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "r1"},
            ).json()
            client.post("/v1/completions", json={"prompt": 5})
            client.get("/health")
        server.signal(signal.SIGTERM)
        server.wait()
    assert {path for path, _ in received} == {"/v1/traces"}
    for secret in ("secret words", "stop words", answer["choices"][0]["message"]["content"]):
        assert all(secret.encode() not in body for _, body in received)
    spans, resources = [], []
    for _, body in received:
        for resource in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
            resources.append({pair.key: value(pair) for pair in resource.resource.attributes})
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert {r["service.name"] for r in resources} == {"octavo-engine"}
    assert {r["service.instance.id"] for r in resources} == {"pod-7"}

    ours = {span.name: span for span in spans if span.trace_id.hex() == TRACE}
    assert set(ours) == {"POST /v1/chat/completions", "queue", "prefill", "decode"}
    root = ours["POST /v1/chat/completions"]
    assert root.parent_span_id.hex() == SPAN
    phases = [ours[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent_span_id == root.span_id for phase in phases)
    edges = [root.start_time_unix_nano]
    for phase in phases:
        edges += [phase.start_time_unix_nano, phase.end_time_unix_nano]
    assert [*edges, root.end_time_unix_nano] == sorted([*edges, root.end_time_unix_nano])
    assert edges[2] == edges[3] and edges[4] == edges[5]
    said = {pair.key: value(pair) for pair in root.attributes}
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "m"
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.seed"]) == (0.25, 3)
    assert said["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 5
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert (said["octavo.request_id"], said["octavo.stream"]) == ("r1", False)
    assert [event.name for event in root.events] == ["gen_ai.first_token"]

    others = {span.name for span in spans} - set(ours)
    assert others == {"POST /v1/completions"}  # a bad request is seen, a probe is not


def test_a_collector_that_is_no_url_ends_the_start_with_a_sentence(capfd):
    from octavo import cli

    assert cli.main(("serve", "m", "--device", "sim", "--port", "0", "--otlp-endpoint", "c")) != 0
    assert "--otlp-endpoint: 'c' is no http(s):// URL" in capfd.readouterr().err
