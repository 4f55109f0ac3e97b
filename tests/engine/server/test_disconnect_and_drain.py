"""Clients that disconnect and servers that drain: nothing runs for them, nothing is cut off."""

from __future__ import annotations

import json
import socket

import pytest

from octavo_engine.server.limits import RequestLimits
from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import post, running

COMPLETIONS = "/v1/completions"


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def body(**more) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 50, "ignore_eos": True, **more}).encode()


@pytest.mark.parametrize(
    ("more", "num_sequences"),
    [
        ({"stream": True}, 1),
        ({"stream": False}, 1),
        ({"stream": True, "n": 3}, 1),
        ({"stream": True, "prompt": ["a", "b", "c"]}, 3),
        ({"stream": False, "prompt": ["a", "b"]}, 2),
    ],
)
def test_a_client_that_leaves_aborts_its_request(more, num_sequences):
    engine = FakeEngine(hold_after=3)
    with running(engine) as server:
        with connect(server) as connection:
            connection.sendall(post(COMPLETIONS, body(**more)))
            server.wait_for(engine.holding)
        server.wait_for(engine.aborts)
        with server.client() as client:
            metrics = client.get("/metrics").text

    assert len(engine.aborted) == num_sequences
    assert server.service.admission.in_flight == 0
    answers = num_sequences * more.get("n", 1)
    assert (
        f'request_success_total{{engine="0",finished_reason="abort",model_name="fake"}} {answers}.0'
        in metrics
    )


def test_a_client_that_reads_nothing_is_disconnected():
    engine = FakeEngine(max_model_len=30_000)
    limits = RequestLimits(write_timeout_s=0.2, max_logprobs=20)
    requested = body(stream=True, logprobs=20, max_tokens=20_000)  # fat chunks fill buffers soon
    with running(engine, ServerSettings(limits=limits)) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post(COMPLETIONS, requested))
        server.wait_for(engine.aborts)

    assert len(engine.aborted) == 1
    assert server.service.admission.in_flight == 0


def test_a_draining_server_refuses_new_work_and_finishes_the_old():
    engine = FakeEngine(hold_after=2)
    with running(engine) as server, connect(server) as connection:
        connection.sendall(post(COMPLETIONS, body(max_tokens=5)))
        server.wait_for(engine.holding)
        with server.client() as client:
            drained = client.post("/octavo/v1/drain")
            again = client.post("/octavo/v1/drain")
            refused = client.post(COMPLETIONS, json={"prompt": "a"})
            probes = [client.get(path).status_code for path in ("/ready", "/health", "/livez")]
        server.call(engine.release.set)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk

    assert (drained.status_code, drained.json()) == (202, {"state": "draining", "in_flight": 1})
    assert again.status_code == 202
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers["retry-after"] == "1"
    assert probes == [503, 200, 200]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 5
    assert server.service.admission.drain_requested.is_set()


def test_more_requests_than_may_be_in_flight_get_a_503():
    engine = FakeEngine(hold_after=0)
    settings = ServerSettings(limits=RequestLimits(max_concurrent_requests=1))
    with running(engine, settings) as server, connect(server) as connection:
        connection.sendall(post(COMPLETIONS, body()))
        server.wait_for(engine.holding)
        with server.client() as client:
            answer = client.post(COMPLETIONS, json={"prompt": "a"})

    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "overloaded_error"
