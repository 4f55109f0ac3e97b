"""What the page is told: what stands, what ended since, and nothing of other tenants."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest

from octavo_engine.protocol.loading import LoadProgress
from octavo_router.console.live import MAX_VIEWERS, Live, Sources
from octavo_router.console.recent import NUM_KEPT, Recent
from octavo_router.errors import Rejected
from octavo_router.flow.admission import AdmissionDemand
from octavo_router.http.messages import Headers, Inbound
from octavo_router.metrics import RequestRecord, RouterMetrics
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.routing.models import Models
from tests.fakes.endpoints import World
from tests.fakes.router_rig import on_loop


class Tenant:
    def __init__(self, name: str) -> None:
        self.name = name


class Rig:
    """A console over a world of two engines; the key is the tenant's name."""

    def __init__(self, *, asks_for_keys: bool = False) -> None:
        self.world = World(2)
        self.metrics = RouterMetrics(version="1.2.3", now=self.world.clock)
        index = PyResidencyIndex()
        for endpoint in self.world.endpoints:
            endpoint.slot = index.add_slot()
            endpoint.names = ("m",)
        self.world.registry.changed(self.world.endpoints[0])
        self.live = Live(
            Sources(
                registry=self.world.registry,
                models=Models(self.world.registry),
                metrics=self.metrics,
                index=index,
                demand=lambda _: AdmissionDemand(1, 2, 3),
                authenticate=self._authenticate,
                asks_for_keys=lambda: asks_for_keys,
                replica="router-0",
            ),
            every_s=0.01,
        )

    def _authenticate(self, authorization: str) -> Any:
        if not authorization.startswith("Bearer "):
            raise Rejected(401, "invalid_api_key", "A key is needed.")
        return Tenant(authorization.removeprefix("Bearer "))

    def end(self, request_id: str, **fields: Any) -> None:
        known: dict[str, Any] = {
            "tenant": "a", "pool": "pool", "model": "m", "is_known_model": True, "status": 200
        }  # fmt: skip
        self.metrics.finish(RequestRecord(request_id=request_id, **(known | fields)))

    def open(self, key: str = "") -> Any:
        """The stream of one viewer."""
        raw = [(b"authorization", f"Bearer {key}".encode())] if key else []
        reply = self.live(Inbound("GET", "/octavo/v1/console", headers=Headers(raw)))
        assert reply.content_type == "text/event-stream"
        return reply.body

    async def look(self, num_events: int, key: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with aclosing(self.open(key)) as events:
            async for event in events:
                assert event.startswith(b"data: ")
                assert event.endswith(b"\n\n")
                found.append(json.loads(event[6:]))
                if len(found) == num_events:
                    break
        return found


@on_loop
async def test_a_viewer_sees_engines_pools_and_what_has_ended():
    rig = Rig()
    first = rig.world.endpoints[0]
    first.in_flight = 4
    rig.world.tell(first, running=3, waiting=1, kv_usage=0.25)
    rig.end("r1", prompt_tokens=40, cached_tokens=32, output_tokens=5, endpoint="10.0.0.1:8000")
    (shown,) = await rig.look(1)
    assert (shown["version"], shown["replica"], shown["models"]) == ("1.2.3", "router-0", ["m"])
    engine = shown["endpoints"][0]
    assert (engine["state"], engine["in_flight"], engine["running"]) == ("ready", 4, 3)
    assert engine["kv_usage"] == 0.25
    (pool,) = shown["pools"]
    assert (pool["held"], pool["queued"], pool["in_flight"], pool["engines"]) == (1, 2, 4, 2)
    (request,) = shown["requests"]
    assert (request["id"], request["cached_tokens"], request["output_tokens"]) == ("r1", 32, 5)
    assert "tenant" not in request
    assert "client" not in request
    assert shown["tokens"] == {"prompt": 40, "output": 5, "cached": 32}
    assert shown["num_requests"] == 1


@on_loop
async def test_an_engine_that_loads_says_how_far_it_is():
    rig = Rig()
    first = rig.world.endpoints[0]
    first.loading, first.progress = 0.5, LoadProgress("fetching", 2**30, 2**31, 2**28)
    first.reason = "/octavo/v1/stream answers 503"
    (shown,) = await rig.look(1)
    loading, other = shown["endpoints"]
    assert loading["reason"] == "fetching weights: 1.0 of 2.0 GiB at 256.0 MiB/s, 4 s left"
    assert other["reason"] == ""


@on_loop
async def test_each_request_is_told_once_to_each_viewer():
    rig = Rig()
    rig.end("r1")
    async with aclosing(rig.open()) as events:

        async def ids() -> list[str]:
            event = await anext(events)
            return [each["id"] for each in json.loads(event[6:])["requests"]]

        assert await ids() == ["r1"]
        assert await ids() == []
        rig.end("r2")
        rig.end("r3")
        assert await ids() == ["r2", "r3"]
    (late,) = await rig.look(1)
    assert [each["id"] for each in late["requests"]] == ["r1", "r2", "r3"]


@on_loop
async def test_with_keys_a_tenant_hears_of_its_own_requests_only():
    rig = Rig(asks_for_keys=True)
    rig.end("mine", tenant="a")
    rig.end("theirs", tenant="b")
    (shown,) = await rig.look(1, key="a")
    assert [each["id"] for each in shown["requests"]] == ["mine"]
    with pytest.raises(Rejected) as refused:
        await rig.look(1)
    assert refused.value.status == 401


@on_loop
async def test_there_are_only_so_many_viewers_and_who_leaves_makes_room():
    rig = Rig()
    viewers = [rig.open() for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await anext(viewer)
    with pytest.raises(Rejected) as refused:
        rig.open()
    assert (refused.value.status, refused.value.code) == (503, "too_many_viewers")
    await viewers[0].aclose()
    assert await rig.look(1)
    for viewer in viewers[1:]:
        await viewer.aclose()


@on_loop
async def test_streams_end_when_the_router_goes():
    rig = Rig()
    looking = asyncio.create_task(rig.look(10_000))
    await asyncio.sleep(0)
    rig.live.close()
    assert await looking


def test_the_ring_keeps_the_newest():
    recent = Recent()
    recent.take([RequestRecord(request_id=str(i)) for i in range(NUM_KEPT + 5)])
    kept = list(recent.since(0))
    assert len(kept) == NUM_KEPT
    assert [record.request_id for _, record in kept[:2]] == ["5", "6"]
    assert [number for number, _ in recent.since(NUM_KEPT + 3)] == [NUM_KEPT + 4, NUM_KEPT + 5]
