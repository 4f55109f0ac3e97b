"""A client that does not read its stream holds no row and no memory of the engine."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

from octavo_engine.protocol.metric_names import GENERATION_TOKENS, NUM_REQUESTS_RUNNING
from tests.fakes.process import PATIENCE_S, serving

TOKENS = 6000


def test_others_are_served_while_a_stream_is_not_read():
    flags = ("--max-num-seqs", "1", "--max-model-len", "8192", "--sim-step-base-ms", "1")
    body = {
        "prompt": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "logprobs": 20,
    }  # fmt: skip
    payload = json.dumps(body).encode()
    with serving(*flags) as server, server.client() as client, socket.socket() as connection:
        address = urlsplit(server.url)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.settimeout(PATIENCE_S)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(payload) + payload
        )
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
