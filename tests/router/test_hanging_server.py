"""The event loop of an engine's server hangs: probes and routers notice, and others serve.

Red when: a router waits for a server that says nothing, or nobody learns where it hung.
"""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest

from octavo_common.failpoints import VARIABLE
from tests.fakes.process import PATIENCE_S, serving
from tests.fakes.router_process import RouterProcess, routing, streams
from tests.router.conftest import ENGINE_FLAGS, port_of
from tests.router.test_with_engines import PATH, all_whole, bodies, unbroken

pytestmark = pytest.mark.slow

HANGS_S = 12
NOTICED_WITHIN_S = 5.0
STREAMS = bodies(4, max_tokens=200, start=1200)


def states(router: RouterProcess) -> list[str]:
    return list(router.states().values())


def test_a_loop_that_hangs_is_noticed_in_five_seconds_and_its_stack_is_logged():
    # The third request that it gets itself hangs: of four streams it gets half.
    point = {VARIABLE: f"server.request=delay:{HANGS_S}@{len(STREAMS) + 1}"}
    with serving(*ENGINE_FLAGS) as other, serving(*ENGINE_FLAGS, env=point) as hanging:
        texts = unbroken(other.url, STREAMS)
        with routing("--upstreams", f"{hanging.url},{other.url}") as router:
            router.until(lambda: states(router) == ["ready"] * 2)
            body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

            def ask_it() -> None:
                """Until one of them hangs."""
                for _ in range(len(STREAMS) + 1):
                    sent_at.append(time.monotonic())
                    httpx.post(hanging.url + PATH, json=body, timeout=PATIENCE_S)

            asking = threading.Thread(target=ask_it)
            sent_at: list[float] = []
            noticed: list[float] = []

            def hang() -> None:
                asking.start()
                router.until(lambda: router.states()[port_of(hanging)] != "ready")
                noticed.append(time.monotonic() - sent_at[-1])
                with pytest.raises(httpx.TimeoutException):
                    httpx.get(hanging.url + "/health", timeout=1.0)

            received = asyncio.run(streams(router.port, STREAMS, after=4, meanwhile=hang))
            all_whole(received, texts)
            assert noticed[0] < NOTICED_WITHIN_S
            asking.join(PATIENCE_S)
            router.until(lambda: states(router) == ["ready"] * 2)
            assert httpx.get(hanging.url + "/health", timeout=PATIENCE_S).status_code == 200
        hanging.process.terminate()
        assert hanging.process.stderr is not None
        log = hanging.process.stderr.read()
        assert "The event loop stood still" in log
        assert "failpoints.py" in log and "hit" in log
