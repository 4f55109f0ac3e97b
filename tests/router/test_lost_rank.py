"""A group of 64 simulated ranks loses one: its streams continue at another one, and it comes back.

Red when: the error does not name the rank, a stream is lost or differs, or the group stays away.
"""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

from tests.fakes.process import serving
from tests.fakes.router_process import StreamResult, routing, stream
from tests.router.conftest import ENGINE_FLAGS
from tests.router.test_with_engines import all_whole, bodies, unbroken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Ranks that hang are given up after ten simulated seconds.
GROUP = (*ENGINE_FLAGS, "--tensor-parallel-size", "64", "--sim-exchange-ms", "100",
         "--sim-time-scale", "0.2")  # fmt: skip
STREAMS = 32
STEP = "20"  # of 40 or more


async def all_streams(port: int, wanted: list[dict[str, Any]]) -> list[StreamResult]:
    return await asyncio.gather(*(stream(port, body) for body in wanted))


@pytest.mark.parametrize(
    ("flag", "how"),
    [
        ("--sim-rank-ends-at-step", "was ended by SIGKILL"),
        ("--sim-rank-hangs-at-step", "hangs: the others"),
    ],
)
def test_a_rank_of_64_is_lost_under_streams(flag: str, how: str) -> None:
    with serving(*GROUP) as other, serving(*GROUP, flag, STEP) as fragile:
        logged: list[str] = []
        assert fragile.process.stderr is not None
        # Nobody else reads it, and a pipe that is full stops a server.
        reader = threading.Thread(target=logged.extend, args=(fragile.process.stderr,))
        reader.start()
        wanted = bodies(STREAMS, start=900)
        texts = unbroken(other.url, wanted)
        with routing("--upstreams", f"{fragile.url},{other.url}") as router:
            router.until(lambda: list(router.states().values()) == ["ready"] * 2)
            all_whole(asyncio.run(all_streams(router.port, wanted)), texts)
            assert router.metric("octavo_router_resumes_total") > 0
            with fragile.client() as client:
                router.until(lambda: client.get("/ready").status_code == 200)
            named = re.compile(rf"rank ([1-9]|[1-5]\d|6[0-3]) of 64 {how}")
            router.until(lambda: any(map(named.search, list(logged))))
