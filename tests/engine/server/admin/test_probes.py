"""The table of health: every state, every probe, exactly."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from octavo_common.clock_watch import ClockWatch
from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.protocol.loading import LoadProgress, read_progress
from octavo_engine.server import run
from tests.fakes.engine import FakeEngine
from tests.fakes.server import running

if TYPE_CHECKING:
    from octavo_engine.server.service import Service

TABLE = {  # /livez, /health, /ready
    "loading": (200, 503, 503),
    "ready": (200, 200, 200),
    "saturated": (200, 200, 503),
    "stalled": (503, 503, 503),
    "draining": (200, 200, 503),
    "dead": (503, 503, 503),
}


@pytest.mark.parametrize("state", TABLE)
def test_each_state_answers_each_probe(state):
    engine = FakeEngine(state=state, progress=0.25)
    if state == "saturated":
        engine.config = EngineConfig(model="fake", scheduler=SchedulerConfig(max_queue=3))
        engine.state, engine.stats.num_waiting = "ready", 3
    with running(engine) as server, server.client() as client:
        livez, health, ready = (client.get(path) for path in ("/livez", "/health", "/ready"))
        aliases = client.get("/healthz"), client.get("/readyz")

    assert (livez.status_code, health.status_code, ready.status_code) == TABLE[state]
    assert [answer.status_code for answer in aliases] == [health.status_code, ready.status_code]
    assert livez.json()["state"] == ready.json()["state"] == state
    assert (health.text == "") == (health.status_code == 200)
    assert ("retry-after" in ready.headers) == (ready.status_code == 503)
    assert ready.json().get("progress") == (0.25 if state == "loading" else None)


def test_an_engine_that_loads_tells_how_many_bytes_it_has():
    reported = LoadProgress("loading", 1000, 4000, 500)
    engine = FakeEngine(state="loading", progress=0.25, loading=reported)
    with running(engine) as server, server.client() as client:
        bodies = [client.get(path).json() for path in ("/ready", "/octavo/v1/stream")]
    assert bodies[0] == bodies[1]
    assert bodies[0]["loading"] == {
        "phase": "loading", "bytes_done": 1000, "bytes_total": 4000, "bytes_per_s": 500,
    }  # fmt: skip
    assert read_progress(bodies[0]["loading"]) == reported


@pytest.mark.parametrize(
    ("state", "code"),
    [("loading", "loading"), ("stalled", "engine_stalled"), ("draining", "draining"),
     ("dead", "engine_dead")],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_work_is_refused_with_a_time_to_come_back(state, code, path):
    with running(FakeEngine(state=state)) as server, server.client() as client:
        answer = client.post(path, json={"prompt": "a"})

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == code
    assert int(answer.headers["retry-after"]) >= 1


def test_models_and_metrics_answer_while_loading():
    with running(FakeEngine(state="loading")) as server, server.client() as client:
        assert client.get("/v1/models").status_code == 200
        assert (
            'octavo_engine_state{engine="0",model_name="fake",state="loading"} 1.0'
            in client.get("/metrics").text
        )


def test_health_shows_for_minutes_that_the_clock_was_set():
    with running(FakeEngine()) as server, server.client() as client:
        assert "octavo-clock-jump" not in client.get("/health").headers
        offset_s = 0.0
        server.service.clock = ClockWatch(wall=lambda: time.time() + offset_s)
        server.service.clock.look()
        offset_s = 3600.0
        server.service.clock.look()
        answer = client.get("/health")
        assert (answer.status_code, answer.text) == (200, "")
        assert float(answer.headers["octavo-clock-jump"]) == pytest.approx(3600.0, abs=1.0)
        assert re.search(
            r"^octavo_clock_jumps_total\{.*\} 1\.0$", client.get("/metrics").text, re.M
        )
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_server_looks_whether_the_clock_was_set(monkeypatch, caplog):
    """Within five seconds: once a second."""
    assert run.CLOCK_LOOK_S <= 1.0
    monkeypatch.setattr(run, "CLOCK_LOOK_S", 0.01)
    offset_s = 0.0

    async def scene() -> None:
        nonlocal offset_s
        service = SimpleNamespace(clock=ClockWatch(wall=lambda: time.time() + offset_s))
        watching = asyncio.create_task(run._watch_clock(cast("Service", service)))
        await asyncio.sleep(0.05)
        offset_s = -3600.0
        while not service.clock.num_jumps:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(scene())
    assert [record.message for record in caplog.records] == ["The clock was set"]
