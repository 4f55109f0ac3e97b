"""Pause: what runs ends, what comes waits, and goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from octavo_engine.server.settings import ServerSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.server import post, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    from tests.fakes.server import RunningServer

WORK = {"prompt": "a", "max_tokens": 3, "temperature": 0}


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(FakeEngine(), ServerSettings(dev_mode=True)) as server:
        yield server


class SentRequest:
    """A request in a thread of its own."""

    def __init__(self, server: RunningServer, path: str = "/v1/completions") -> None:
        self.answer: httpx.Response | None = None

        def ask() -> None:
            with server.client() as client:
                self.answer = client.post(path, json=WORK)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def result(self) -> httpx.Response:
        self._thread.join(60)
        assert self.answer is not None
        return self.answer


def until(server: RunningServer, is_true: Callable[[], bool]) -> None:
    """On the server's loop, where that state belongs."""

    async def look() -> None:
        ends_at = time.monotonic() + 60
        while not is_true():
            assert time.monotonic() < ends_at
            await asyncio.sleep(0.002)

    asyncio.run_coroutine_threadsafe(look(), server.loop).result(90)


def wait_for_held(server: RunningServer, count: int = 1) -> None:
    until(server, lambda: server.service.metrics.http_in_flight >= count)


def test_what_comes_waits_and_goes_on(server):
    with server.client() as client:
        usual = client.post("/v1/completions", json=WORK).json()["choices"]
        assert client.get("/is_paused").json() == {"is_paused": False}
        assert client.post("/pause").json() == {"is_paused": True}
        assert client.post("/pause").json() == {"is_paused": True}  # a second call does no more
        requested = SentRequest(server)
        wait_for_held(server)
        assert (requested.answer, server.service.admission.in_flight) == (None, 0)
        assert client.get("/is_paused").json() == {"is_paused": True}
        assert client.get("/health").status_code == 200
        assert client.post("/resume").json() == {"is_paused": False}
        assert requested.result().json()["choices"] == usual


@pytest.mark.parametrize(("query", "resets"), [("", 1), ("?clear_cache=false", 0)])
def test_the_cache_is_forgotten_unless_told_otherwise(server, query, resets):
    with server.client() as client:
        client.post("/pause" + query).raise_for_status()
    assert server.engine.num_resets == resets


def test_what_runs_is_ended_or_waited_for():
    for mode, reason in (("abort", "abort"), ("wait", "length")):
        engine = FakeEngine(hold_after=1)
        with running(engine, ServerSettings(dev_mode=True)) as server:
            requested = SentRequest(server)
            server.wait_for(engine.holding)
            pausing = SentRequest(server, f"/pause?mode={mode}")
            if mode == "wait":
                wait_for_held(server, 2)
                assert pausing.answer is None
            else:
                until(server, partial(bool, engine.stopped))
            server.call(engine.release.set)
            assert requested.result().json()["choices"][0]["finish_reason"] == reason
            assert pausing.result().json() == {"is_paused": True}


def test_a_held_request_has_its_deadline_and_its_client(server):
    with server.client() as client:
        client.post("/pause").raise_for_status()
        late = client.post("/v1/completions", json=WORK, headers={"x-octavo-timeout-ms": "30"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(post("/v1/completions", b"{}"))
            wait_for_held(server)

        until(server, lambda: not server.service.metrics.http_in_flight)


def test_a_server_that_ends_holds_nobody(server):
    with server.client() as client:
        client.post("/pause").raise_for_status()
        requested = SentRequest(server)
        wait_for_held(server)
        server.call(server.service.start_draining)
        assert requested.result().json()["error"]["code"] == "draining"


def test_a_mode_that_is_none_is_refused(server):
    with server.client() as client:
        answer = client.post("/pause?mode=keep")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")
        assert client.get("/is_paused").json() == {"is_paused": False}
