"""`octavo ps` asks the servers themselves, and waits for none that does not answer."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from octavo.models import server_load
from octavo.models.server_load import ReportedLoad, loads_of

if TYPE_CHECKING:
    from collections.abc import Iterator

METRICS = """# HELP octavo_num_requests_running Requests that are running.
octavo_num_requests_running{model_name="m",engine="0"} 3.0
octavo_num_requests_running{model_name="m",engine="1"} 1.0
octavo_num_requests_waiting{model_name="m",engine="0"} 2.0
octavo_num_requests_waiting_by_reason{reason="deferred"} 7.0
octavo_kv_cache_usage_perc{engine="0"} 0.25
octavo_kv_cache_usage_perc{engine="1"} 0.5
"""
MODELS = json.dumps({"data": [{"id": "m"}, {"id": "adapter"}]})


@contextmanager
def serving(answers: dict[str, str], key: str = "") -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = answers.get(self.path, "").encode()
            is_known = not key or self.headers.get("authorization") == f"Bearer {key}"
            self.send_response((200 if body else 404) if is_known else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_requests_of_all_cores_are_added_up():
    with serving({"/metrics": METRICS, "/v1/models": MODELS}) as url:
        (load,) = loads_of([url], {})
    assert load == ReportedLoad(("m", "adapter"), 4, 2, 0.5)
    assert load.text == "4 running, 2 waiting, KV 50%"


def test_a_key_is_sent_and_a_refusal_is_unknown():
    with serving({"/metrics": METRICS, "/v1/models": MODELS}, key="k") as url:
        assert loads_of([url], {"OCTAVO_API_KEY": "k"})[0] == ReportedLoad(
            ("m", "adapter"), 4, 2, 0.5
        )
        (load,) = loads_of([url], {})
    assert load == ReportedLoad(None, None, None, None)
    assert load.text == "unknown"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{",
        "[]",
        '{"data": 3}',
        "octavo_num_requests_running x",
        "octavo_num_requests_running NaN",
    ],
)
def test_what_is_no_answer_of_ours_is_unknown(answer: str):
    with serving({"/metrics": answer, "/v1/models": answer}) as url:
        assert loads_of([url], {})[0] == ReportedLoad(None, None, None, None)


def test_no_proxy_is_between(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving({"/metrics": METRICS, "/v1/models": MODELS}) as url:
        assert loads_of([url], {})[0] is not None


def test_one_that_is_silent_is_not_waited_for(monkeypatch):
    import socket

    monkeypatch.setattr(server_load, "TIMEOUT_S", 0.05)
    with socket.socket() as silent, serving({"/metrics": METRICS}) as url:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        quiet = f"http://127.0.0.1:{silent.getsockname()[1]}"
        found = loads_of([quiet, "http://127.0.0.1:9", url], {})
    assert [load is None for load in found] == [True, True, False]
    assert loads_of([], {}) == []
