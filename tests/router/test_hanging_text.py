"""A thread that reads a long text hangs: health and routers notice, and everything else goes on.

Red when: nobody learns of the hang, other requests wait for it, or the process cannot end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import httpx
import pytest

from octavo_common.failpoints import VARIABLE
from octavo_engine.tokenization.threads import INLINE_CHARS, LONG_CHARS
from tests.fakes.process import PATIENCE_S, ServeProcess, serving
from tests.fakes.router_process import RouterProcess, routing, streams
from tests.router.conftest import ENGINE_FLAGS, port_of
from tests.router.test_with_engines import PATH, all_whole, bodies, unbroken

pytestmark = pytest.mark.slow

FOR_EVER_S = 600
NOTICED_WITHIN_S = 5.0
SLOW_ENGINE = (*ENGINE_FLAGS, "--sim-step-base-ms", "20")
STREAMS = bodies(4, max_tokens=400, start=1300)  # of eight seconds: longer than until it is noticed
SHORT = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def health(engine: ServeProcess) -> httpx.Response:
    return httpx.get(engine.url + "/health", timeout=PATIENCE_S)


def send_text(engine: ServeProcess, num_chars: int) -> None:
    """It gets no answer while the test lasts."""
    body = {"model": "sim", "prompt": "a " * (num_chars // 2), "max_tokens": 1}
    with suppress(httpx.HTTPError):
        httpx.post(engine.url + "/v1/completions", json=body, timeout=2 * PATIENCE_S)


def until_stalled(engine: ServeProcess, router: RouterProcess, sent_at: float) -> None:
    while health(engine).status_code == 200:
        assert time.monotonic() - sent_at < NOTICED_WITHIN_S
        time.sleep(0.05)
    router.until(lambda: router.states()[port_of(engine)] != "ready")
    assert time.monotonic() - sent_at < NOTICED_WITHIN_S


@pytest.mark.parametrize("num_chars", [INLINE_CHARS + 2, LONG_CHARS + 2])
def test_a_text_that_hangs_is_noticed_in_five_seconds_and_costs_no_stream(num_chars: int) -> None:
    point = {VARIABLE: f"server.text=delay:{FOR_EVER_S}@1"}
    with serving(*SLOW_ENGINE) as other, serving(*SLOW_ENGINE, env=point) as hanging:
        texts = unbroken(other.url, STREAMS)
        with routing("--upstreams", f"{hanging.url},{other.url}") as router:
            router.until(lambda: list(router.states().values()) == ["ready"] * 2)

            def hang() -> None:
                sender = threading.Thread(target=send_text, args=(hanging, num_chars), daemon=True)
                sender.start()
                until_stalled(hanging, router, time.monotonic())

            received = asyncio.run(streams(router.port, STREAMS, after=4, meanwhile=hang))
            all_whole(received, texts)
            answer = health(hanging)
            assert answer.status_code == 503
            assert answer.json()["state"] == "stalled"
            assert f"a text of {num_chars} characters" in answer.json()["reason"]
            refused = httpx.post(hanging.url + PATH, json=SHORT, timeout=PATIENCE_S)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stalled")
            for _ in range(4):
                served = httpx.post(f"http://127.0.0.1:{router.port}{PATH}", json=SHORT)
                assert served.status_code == 200
        hanging.process.terminate()  # as the kubelet does when the probe fails
        assert hanging.process.wait(PATIENCE_S) == 0
        assert hanging.process.stderr is not None
        log = hanging.process.stderr.read()
        assert "Reading a text hangs" in log
        assert "failpoints.py" in log


def test_a_text_that_takes_long_is_no_hang_for_long() -> None:
    """What was slow, and has ended, leaves an engine that serves."""
    point = {VARIABLE: "server.text=delay:5@1"}
    with serving(*ENGINE_FLAGS, env=point) as engine:
        send_text(engine, INLINE_CHARS + 2)
        assert health(engine).status_code == 200
        served = httpx.post(engine.url + PATH, json=SHORT, timeout=PATIENCE_S)
        assert served.status_code == 200
