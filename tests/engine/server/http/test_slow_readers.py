"""A client that does not read its stream holds no row and no memory of the engine."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
import pytest

from octavo_engine.protocol.metric_names import GENERATION_TOKENS, NUM_REQUESTS_RUNNING
from tests.fakes.process import PATIENCE_S, serving

if TYPE_CHECKING:
    from tests.fakes.process import ServeProcess

pytestmark = pytest.mark.slow

TOKENS = 6000
EVENT_BYTES = 500  # at least, with twenty logprobs


def unread_stream(server: ServeProcess, max_tokens: int) -> socket.socket:
    """A request that is sent; nothing of its answer is read."""
    body = {
        "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "logprobs": 20,
    }  # fmt: skip
    payload = json.dumps(body).encode()
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    connection.settimeout(PATIENCE_S)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload
    )
    return connection


def test_others_are_served_while_a_stream_is_not_read():
    flags = ("--max-num-seqs", "1", "--max-model-len", "8192", "--sim-step-base-ms", "1",
             "--write-timeout", "600")  # fmt: skip
    with (
        serving(*flags) as server,
        server.client() as client,
        unread_stream(server, TOKENS) as connection,
    ):
        connection.recv(1)  # it has begun

        def value(name: str) -> float:
            lines = client.get("/metrics").text.splitlines()
            [line] = [one for one in lines if one.startswith(f"{name}{{")]
            return float(line.rpartition(" ")[2])

        until = time.monotonic() + PATIENCE_S
        while value(NUM_REQUESTS_RUNNING):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert 0 < value(f"{GENERATION_TOKENS}_total") < TOKENS
        other = client.post("/v1/completions", json={"prompt": "b", "max_tokens": 5})
        assert other.status_code == 200  # there is one row
        answer = b""
        while piece := connection.recv(2**20):
            answer += piece
    assert b"[DONE]" in answer
    assert answer.count(b'"top_logprobs"') > 0
    assert b'"finish_reason":"length"' in answer


def test_little_is_computed_for_a_client_that_does_not_read():
    """The kernel would take megabytes."""
    flags = ("--max-model-len", "8192", "--sim-step-base-ms", "10")
    with serving(*flags) as server, server.client() as client, unread_stream(server, TOKENS):

        def value(name: str) -> float:
            lines = client.get("/metrics").text.splitlines()
            return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(name))

        until = time.monotonic() + PATIENCE_S
        while not value(f"{GENERATION_TOKENS}_total{{") or value(f"{NUM_REQUESTS_RUNNING}{{"):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert value(f"{GENERATION_TOKENS}_total{{") < 2**19 / EVENT_BYTES


@pytest.mark.parametrize("max_tokens", [180, TOKENS], ids=["over", "paused"])
def test_a_client_that_does_not_read_is_disconnected(max_tokens: int):
    """Whether its answer waits for room, or is over and waits to be sent."""
    flags = ("--max-model-len", "8192", "--sim-step-base-ms", "1", "--write-timeout", "1")
    with serving(*flags) as server, unread_stream(server, max_tokens) as connection:
        connection.recv(1)
        process, port = psutil.Process(server.process.pid), connection.getsockname()[1]

        def is_connected() -> bool:
            connections = process.net_connections(kind="tcp")
            return any(one.raddr and one.raddr.port == port for one in connections)

        assert is_connected()
        until = time.monotonic() + PATIENCE_S
        while is_connected():
            assert time.monotonic() < until
            time.sleep(0.05)
        with pytest.raises(ConnectionResetError):  # what was unsent is not kept for it
            while connection.recv(2**20):
                pass


def test_a_client_that_reads_slowly_and_steadily_gets_all_of_its_answer():
    flags = ("--max-model-len", "8192", "--sim-step-base-ms", "1", "--write-timeout", "1")
    with serving(*flags) as server, unread_stream(server, 400) as connection:
        answer = b""
        while piece := connection.recv(20_000):
            answer += piece
            time.sleep(0.05)
    assert len(answer) > 400 * EVENT_BYTES
    assert b"[DONE]" in answer
