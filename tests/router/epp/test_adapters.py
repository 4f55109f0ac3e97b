"""A gateway's requests for adapters: they wait for the load, and go where it happened."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from octavo_router.config.settings import (
    AdapterConfig,
    BackendConfig,
    PoolConfig,
    RouterConfig,
    RoutingConfig,
    ServedModelConfig,
)
from tests.fakes.envoy import picking
from tests.fakes.router_rig import on_loop

BODY = json.dumps({"model": "law", "messages": [{"role": "user", "content": "hi"}]}).encode()
ADAPTERS = (AdapterConfig(name="law", uri="/adapters/law"),)
CONFIG = replace(
    RouterConfig(),
    routing=RoutingConfig(pools=(PoolConfig(name="pool", adapters=ADAPTERS),)),
)


@on_loop
async def test_it_waits_for_the_load_and_goes_there():
    async with picking(3, config=CONFIG) as rig:
        async with rig.open() as gateway:
            answering = asyncio.create_task(gateway.post(BODY))
            await rig.until(lambda: rig.adapter_calls.loads)
            ((endpoint, name, uri),) = rig.adapter_calls.loads
            assert (name, uri) == ("law", "/adapters/law")
            await asyncio.sleep(0.02)
            assert not answering.done()
            rig.adapter_calls.finish()
            answer = await answering
            assert answer.destinations[0] == endpoint.spec.address.authority
        await rig.settled()


@on_loop
async def test_why_it_cannot_be_loaded_is_the_answer():
    async with picking(1, config=CONFIG) as rig:
        async with rig.open() as gateway:
            answering = asyncio.create_task(gateway.post(BODY))
            await rig.until(lambda: rig.adapter_calls.loads)
            rig.adapter_calls.finish("no such folder")
            answer = await answering
            assert answer.status == 503
            assert "no such folder" in (answer.body or b"").decode()
        await rig.settled()


@on_loop
async def test_what_a_revision_cannot_load_another_serves():
    models = (
        ServedModelConfig(
            name="model",
            backends=(BackendConfig(pool="pool", revision="new", weight=100.0),),
        ),
    )
    config = replace(CONFIG, models=models)
    async with picking(2, config=config) as rig:
        old, new = rig.endpoints
        new.spec = replace(new.spec, revision="new")
        old.spec = replace(old.spec, revision="old")
        for endpoint in rig.endpoints:
            rig.registry.changed(endpoint)
        async with rig.open() as gateway:
            answering = asyncio.create_task(gateway.post(BODY))
            await rig.until(lambda: rig.adapter_calls.loads)
            assert [endpoint for endpoint, *_ in rig.adapter_calls.loads] == [new]
            rig.adapter_calls.loads.clear()
            rig.adapter_calls.fleet.failed(new, "law", "no such folder")
            await rig.until(lambda: rig.adapter_calls.loads)
            rig.adapter_calls.finish()
            answer = await answering
            assert answer.destinations[0] == old.spec.address.authority
        await rig.settled()


@on_loop
async def test_a_gateway_that_leaves_meanwhile_leaves_nothing():
    async with picking(1, config=CONFIG) as rig:
        gateway = rig.open()
        answering = asyncio.create_task(gateway.post(BODY))
        await rig.until(lambda: rig.adapter_calls.loads)
        gateway.call.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        rig.adapter_calls.finish()
        await rig.settled()


@on_loop
async def test_an_adapter_that_comes_as_a_gateway_leaves_is_no_fault(monkeypatch):
    """Its wait is cancelled, and the router has not yet heard of it."""
    async with picking(1, config=CONFIG) as rig:
        fleet, callbacks = rig.adapter_calls.fleet, []
        wait = fleet.wait

        def waited(request, done):
            callbacks.append(done)
            return wait(request, done)

        monkeypatch.setattr(fleet, "wait", waited)
        gateway = rig.open()
        answering = asyncio.create_task(gateway.post(BODY))
        await rig.until(lambda: rig.adapter_calls.loads)
        gateway.call.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await rig.settled()
        for done in callbacks:
            done(None)


@on_loop
async def test_a_canary_gets_its_share_by_its_own_name():
    canary = AdapterConfig(name="next", uri="/next", canary_of="law", canary_percent=50.0)
    pool = PoolConfig(name="pool", adapters=(*ADAPTERS, canary))
    config = replace(CONFIG, routing=RoutingConfig(pools=(pool,)))
    async with picking(1, config=config) as rig:
        [endpoint] = rig.endpoints
        endpoint.adapters = frozenset({"law", "next"})
        rig.registry.changed(endpoint)
        named = []
        for number in range(30):
            async with rig.open() as gateway:
                await gateway.post(BODY, headers={"x-request-id": str(number)})
                named.append(json.loads(await gateway.body())["model"])
        assert set(named) == {"law", "next"}
        assert [record.model for record in rig.records] == named
        await rig.settled()
