"""The host of an engine vanishes without a packet: its streams continue at another engine.

Red when: the router waits for what cannot come, or a token is lost or doubled.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fakes.process import serving
from tests.fakes.router_process import routing, streams
from tests.fakes.separate_host import separate_host, why_not
from tests.router.conftest import ENGINE_FLAGS, port_of
from tests.router.test_with_engines import all_whole, bodies, unbroken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NOTICED_WITHIN_S = 15.0  # the kernel's user timeout of ten seconds, and some for a busy machine
STEP_MS = "25"


def test_the_host_of_an_engine_vanishes_under_its_streams():
    if reason := why_not():
        pytest.skip(reason)
    flags = (*ENGINE_FLAGS, "--sim-step-base-ms", STEP_MS)
    with (
        separate_host() as host,
        serving(*flags, "--host", "0.0.0.0", inside=host.command) as lost,
        serving(*flags) as other,
    ):
        wanted = bodies(16, max_tokens=100, start=700)
        texts = unbroken(other.url, wanted)
        lost_url = f"http://{host.address}:{port_of(lost)}"
        with routing("--upstreams", f"{lost_url},{other.url}") as router:
            router.until(lambda: list(router.states().values()) == ["ready"] * 2)
            vanished_at: list[float] = []

            def vanish() -> None:
                host.vanish()
                vanished_at.append(time.monotonic())

            received = asyncio.run(streams(router.port, wanted, after=16, meanwhile=vanish))
            took_s = time.monotonic() - vanished_at[0]
            all_whole(received, texts)
            there = [one for one in received if one.served_by == f"{host.address}:{port_of(lost)}"]
            assert there, "no stream was on the host that vanished"
            assert router.metric("octavo_router_resumes_total") >= len(there)
            assert took_s < NOTICED_WITHIN_S + 100 * float(STEP_MS) / 1000

            router.until(lambda: router.states()[port_of(lost)] != "ready")
            host.return_()
            router.until(lambda: list(router.states().values()) == ["ready"] * 2)
