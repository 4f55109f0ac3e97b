"""Engines that fail, crawl or lie are found by what they do, and come back by a test generation."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

from octavo_router.config.settings import HealthConfig
from octavo_router.proxy.canary import Canaries
from octavo_router.routing.health import EndpointHealth
from octavo_router.routing.policies import Policies
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import Rig, fast_config, on_loop, routing_to
from tests.fakes.upstream import Peer, Received, ScriptedUpstream, event, fixed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from octavo_router.endpoints.endpoint import Endpoint

RIGHT = "Paris"


@dataclass
class Engine:
    """One that can be made ill while it runs."""

    mood: str = "well"
    says: str = RIGHT
    num_canaries: int = 0
    num_requests: int = 0

    async def __call__(self, peer: Peer, request: Received) -> None:
        if request.line.startswith(b"POST /v1/completions"):
            self.num_canaries += 1
            if self.mood == "failing":
                return await peer.answer(b"{}", status="500 Internal Server Error")
            choice = {"text": self.says, "index": 0, "finish_reason": "length"}
            return await peer.answer(json.dumps({"choices": [choice]}).encode())
        self.num_requests += 1
        match self.mood:
            case "failing" | "refuses this":
                return await peer.answer(b"{}", status="500 Internal Server Error")
            case "cut":
                await peer.begin_stream()
                await peer.chunk(event("hel"))
                return peer.reset()
            case "slow" | "quick":
                return await self._stream(peer, 0.04 if self.mood == "slow" else 0.0)
        return await fixed(peer, request)

    async def _stream(self, peer: Peer, pause_s: float) -> None:
        await peer.begin_stream()
        for word in ["a", "b", "c"]:
            await peer.chunk(event(word))
            await asyncio.sleep(pause_s)
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        last = json.dumps({"choices": [], "usage": usage}).encode()
        await peer.chunk(b"data: " + last + b"\n\ndata: [DONE]\n\n")
        await peer.end_stream()


class Turns:
    """A policy that goes round, so that all get their share."""

    name = reason = "turns"
    places_adapters = False

    def __init__(self) -> None:
        self._at = 0

    def pick(self, request: Any, endpoints: Sequence[Endpoint], *more: object) -> int:
        self._at += 1
        return self._at % len(endpoints)

    def explain(
        self, request: Any, endpoints: Sequence[Endpoint], *more: object
    ) -> list[dict[str, float]]:
        return [{} for _ in endpoints]


class Now:
    """Time that a test moves, for health alone."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


class Ward:
    def __init__(self, rig: Rig, engines: list[Engine], config: HealthConfig) -> None:
        self.rig = rig
        self.engines = engines
        self.now = Now()
        self.health = EndpointHealth(config)
        self._dispatcher = cast("Any", rig.proxy.dispatcher)
        self._dispatcher.health = self.health
        self._dispatcher._clock = self.now
        self._dispatcher.policies = Policies(Turns())
        self._canaries = Canaries(self._dispatcher, rig.upstreams, fast_config())

    async def second(self) -> None:
        """The app's tick, and the test generations that it starts."""
        self.now.s += 1.0
        for endpoint in self._dispatcher.tick():
            self._canaries.start(endpoint)
        await self.rig.until(lambda: not self._canaries._tasks)

    @property
    def states(self) -> list[str]:
        return [endpoint.state for endpoint in self.rig.endpoints]


@asynccontextmanager
async def ward(count: int, **health: Any) -> AsyncIterator[tuple[Ward, RawClient]]:
    engines = [Engine() for _ in range(count)]
    config = HealthConfig(**{"canary_interval_s": 0.0, "slow_start_s": 0.0, **health})
    ups = [ScriptedUpstream(engine) for engine in engines]
    for up in ups:
        await up.__aenter__()
    try:
        async with (
            routing_to(*(up.port for up in ups)) as rig,
            await RawClient.open(rig.port) as client,
        ):
            yield Ward(rig, engines, config), client
    finally:
        for up in ups:
            await up.__aexit__(None, None, None)


@pytest.mark.parametrize("mood", ["failing", "cut"])
@on_loop
async def test_one_that_fails_is_set_aside_and_returns_when_it_answers_right(mood: str):
    async with ward(3) as (ward_, client):
        ill = ward_.engines[1]
        ill.mood = mood
        for _ in range(20):
            await client.ask(chat(stream=mood == "cut"))
        if mood == "failing":  # a 5xx may be the request's doing: the test says that it is not
            assert ward_.states == ["ready"] * 3
            await ward_.second()
        assert ward_.states == ["ready", "ejected", "ready"]
        requested, tested = ill.num_requests, ill.num_canaries
        assert requested == (7 if mood == "failing" else 5)  # failures in a row, until it is tested

        for _ in range(9):
            await ward_.second()
        assert ill.num_canaries == tested  # its time is not over
        ill.mood, before = "failing", ill.num_canaries
        for _ in range(3):
            await ward_.second()
        assert ward_.states[1] == "ejected" and ill.num_canaries == before + 1
        ill.mood = "well"
        for _ in range(30):
            await ward_.second()
        assert ward_.states == ["ready"] * 3
        for _ in range(6):
            assert (await client.ask(chat())).status == 200
        assert ill.num_requests == requested + 2


@on_loop
async def test_requests_that_get_a_500_from_every_engine_set_none_aside():
    async with ward(3) as (ward_, client):
        for engine in ward_.engines:
            engine.mood = "refuses this"
        for _ in range(60):
            assert (await client.ask(chat())).status == 500
        for _ in range(5):
            await ward_.second()
        assert ward_.states == ["ready"] * 3


@pytest.mark.slow
@on_loop
async def test_one_that_crawls_is_found_beside_the_others():
    async with ward(3, min_requests=5) as (ward_, client):
        for engine in ward_.engines:
            engine.mood = "quick"
        ward_.engines[2].mood = "slow"
        for _ in range(18):
            await client.ask(chat(stream=True))
        await ward_.second()
        assert ward_.states == ["ready", "ready", "ejected"]
        assert "per token" in ward_.rig.endpoints[2].reason


@on_loop
async def test_one_that_lies_is_found_by_its_test_generation():
    """Its requests all succeed; only what it says is wrong (and within 60 s it is known)."""
    async with ward(4, canary_interval_s=10.0) as (ward_, _):
        ward_.engines[3].says = "London"
        seconds = 0
        while ward_.states[3] == "ready":
            await ward_.second()
            seconds += 1
            assert seconds <= 60
        assert ward_.states == ["ready"] * 3 + ["ejected"]
        assert "wrong" in ward_.rig.endpoints[3].reason


@on_loop
async def test_no_more_than_half_are_set_aside_and_when_all_fail_all_are_asked():
    async with ward(4) as (ward_, client):
        for engine in ward_.engines:
            engine.mood = "failing"
        for _ in range(60):
            await client.ask(chat())
        await ward_.second()
        assert ward_.states.count("ejected") == 2
        ready = [one for one in ward_.rig.endpoints if one.state == "ready"]
        for endpoint in ready:
            ward_.rig.registry.report(endpoint, "down")
        found = ward_.rig.registry.candidates("default", "")
        assert found.is_panic and len(found.endpoints) == 2
        for engine in ward_.engines:
            engine.mood = "well"
        assert (await client.ask(chat())).status == 200  # panic: better asked than refused
