"""What the router's own parts predict, against the cached tokens that engines then report.

The engine's real stream, cut as sockets cut it, goes through the router's frame reader and follower
into its compiled index; each body is scanned by its compiled scanner and placed by its dispatcher.
The load is the recorded one of the engine's own test, the pool overflows all the time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.settings import RouterConfig
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.metrics import SignalCounts
from octavo_router.residency import native
from octavo_router.residency.api import CHAT, COMPLETION, MESSAGES, RESPONSES
from octavo_router.routing.build import build_dispatcher
from octavo_router.routing.outcome import OK
from octavo_router.routing.request import RouteRequest
from octavo_router.signals.follow import Follower
from octavo_router.signals.frames import FrameReader
from tests.engine.server.routers.test_residency_prediction import (
    Figures,
    Index,
    prose,
    replay,
    simulated,
)

if TYPE_CHECKING:
    from octavo_engine.protocol import route_keys


KINDS: dict[route_keys.Kind, int] = {
    "chat": CHAT, "completion": COMPLETION, "messages": MESSAGES, "responses": RESPONSES,
}  # fmt: skip


class Router(Index):
    """The parts between an engine's bytes and a decision; the plain dict below it stays in step."""

    def __init__(self) -> None:
        super().__init__()
        hot_path = native.load()
        assert hot_path.is_native, hot_path.problem
        self._scan = hot_path.scan
        self.residency = hot_path.ResidencyIndex()
        registry = Registry(self.residency)
        spec = EndpointSpec("e", Address("127.0.0.1", 1), kind="octavo")
        registry.replace("test", [spec])
        self._dispatcher = build_dispatcher(
            RouterConfig(), registry, self.residency, clock=time.monotonic, rng=random.Random(1)
        )
        [self.endpoint] = registry.endpoints.values()
        self.counts = SignalCounts()
        self._reader = FrameReader()
        self._follower = Follower(
            self.endpoint, self.residency, counts=self.counts, set_state=registry.report,
            on_changed=registry.changed, now=time.monotonic,
        )  # fmt: skip
        self._follower.begin()
        self._rng = random.Random(2)

    def feed(self, data: bytes) -> None:
        super().feed(data)
        while data:
            piece = self._rng.randrange(1, 4000)
            for frame in self._reader.feed(data[:piece]):
                self._follower.take(frame)
            data = data[piece:]

    def predict(self, body: dict[str, Any], kind: route_keys.Kind) -> int:
        scan = self._scan(json.dumps(body).encode(), KINDS[kind])
        request = RouteRequest()
        request.pool = self.endpoint.pool
        request.keys = scan.keys
        request.prompt_bytes = scan.prompt_bytes
        request.prompt_tokens = scan.num_prompt_ids
        lease = self._dispatcher.place(request)
        assert lease is not None
        lease.finish(OK)
        return lease.decision.matched_tokens


@pytest.mark.slow
def test_a_recorded_load_is_predicted_by_the_routers_own_parts(capsys, monkeypatch):
    """At least 999 of 1000 within a block of 16 tokens. OCTAVO_TRACE_REQUESTS makes it longer."""
    if "OCTAVO_TRACE_REQUESTS" not in os.environ:
        prediction = "tests.engine.server.routers.test_residency_prediction"
        monkeypatch.setattr(f"{prediction}.NUM_REQUESTS", 110)

    async def work() -> tuple[Figures, Router]:
        async with simulated(prose(99, 4000), num_blocks=400) as bench:
            router = bench.index = Router()
            await replay(bench)
            return bench.figures, router

    figures, router = asyncio.run(work())
    num_evicted = router.counts.evicted_bytes // 8
    with capsys.disabled():
        print(  # noqa: T201  (the figure is what this is about)
            f"\nprediction by the router: {figures}; {num_evicted} keys evicted"
        )
    assert num_evicted > 1000
    assert router.residency.num_keys(router.endpoint.slot) == len(router.tokens)
    assert figures.share_within_a_block >= 0.999
