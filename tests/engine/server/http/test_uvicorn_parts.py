"""The parts of uvicorn that server/http/connection.py and server/run.py depend on. They are no
stable API of uvicorn, so a release that changes them must fail here, by name."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import Server

from octavo_engine.server.http.connection import BoundedProtocol, CycleLine
from octavo_engine.server.run import HttpServer
from tests.fakes.server import running

# What each object must have while a request is answered.
PROTOCOL = ("url", "headers", "parser", "scheme", "scope", "cycle", "transport", "loop", "flow",
            "_unset_keepalive_if_required")  # fmt: skip
CYCLE = ("chunked_encoding", "flow", "disconnected", "response_started", "response_complete",
         "transport", "keep_alive", "more_body", "message_event", "scope")  # fmt: skip
# Ours in the place of theirs: what they call on themselves, by these names.
REPLACED = ("connection_made", "connection_lost", "data_received", "eof_received",
            "on_headers_complete", "on_message_complete", "on_response_complete",
            "send_400_response")  # fmt: skip
HINT = f"uvicorn {uvicorn.__version__} has changed; look at engine/octavo_engine/server/"


@pytest.fixture(scope="module")
def met():
    """A protocol and a cycle in the midst of a streamed answer."""
    seen: dict[str, Any] = {}

    class Noted(CycleLine):
        __slots__ = ()

        def write(self, payload: bytes) -> None:
            seen.setdefault("cycle", self.cycle)
            seen.setdefault("written", []).append(payload)
            super().write(payload)

    from octavo_engine.server.http import connection

    class Protocol(BoundedProtocol):
        def on_headers_complete(self) -> None:
            super().on_headers_complete()
            seen["protocol"] = self

    before = connection.CycleLine, connection.BoundedProtocol
    connection.CycleLine, connection.BoundedProtocol = Noted, Protocol  # type: ignore[misc]  # put back below
    try:
        with running() as server, server.client() as client:
            body = {"prompt": "a", "max_tokens": 6, "ignore_eos": True, "stream": True}
            seen["text"] = client.post("/v1/completions", json=body).text
            yield seen
    finally:
        connection.CycleLine, connection.BoundedProtocol = before  # type: ignore[misc]  # as above


def test_a_connection_has_what_we_read_of_it(met):
    missing = [name for name in PROTOCOL if not hasattr(met["protocol"], name)]
    assert missing == [], HINT + "http.py"


def test_an_answer_has_what_we_read_of_it(met):
    missing = [name for name in CYCLE if not hasattr(met["cycle"], name)]
    assert missing == [], HINT + "http.py"
    assert hasattr(met["cycle"].flow, "write_paused"), HINT + "http.py"
    assert met["cycle"].chunked_encoding is True, HINT + "http.py"
    assert met["cycle"].transport is met["protocol"].transport  # its request had come
    deadline = time.monotonic() + 5  # the server goes on a little after the client has read all
    while met["protocol"]._unanswered and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not met["protocol"]._unanswered, "on_response_complete was not called: " + HINT


def test_chunks_past_uvicorn_read_as_its_own(met):
    """Some events of the stream were written past it, all arrived whole and in order."""
    assert met["written"], "the short way out was not taken: " + HINT + "http.py"
    frames = met["text"].removesuffix("\n\n").split("\n\n")
    assert len(frames) >= 7 and frames[-1] == "data: [DONE]"
    for payload in met["written"]:
        assert payload.decode() in met["text"]


def test_what_we_replace_is_what_uvicorn_calls():
    for name in REPLACED:
        assert callable(getattr(httptools_impl.HttpToolsProtocol, name, None)), (
            f"{name}: {HINT}http.py"
        )
    assert all(status in httptools_impl.STATUS_LINE for status in (400, 414, 431, 505)), (
        HINT + "http.py"
    )
    for name in ("capture_signals", "main_loop"):
        assert callable(getattr(Server, name, None)), f"{name}: {HINT}run.py"
        assert getattr(HttpServer, name) is not getattr(Server, name)
    source = inspect.getsource(Server)
    assert "self.main_loop()" in source and "self.capture_signals()" in source, HINT + "run.py"
    assert inspect.iscoroutinefunction(Server.on_tick), HINT + "run.py"
    assert "should_exit" in source, HINT + "run.py"
