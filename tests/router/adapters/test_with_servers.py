"""A whole router before servers that load adapters: what clients get, what servers are asked."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from octavo_engine.protocol import route_keys
from octavo_router.config.load import load_config
from octavo_router.config.settings import AdapterConfig
from octavo_router.discovery.source import PoolRoute
from octavo_router.errors import ConfigInvalid
from tests.fakes.facts import until
from tests.fakes.http_client import RawClient, chat
from tests.fakes.lora_server import BASE, LoraServer
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import ScriptedUpstream
from tests.router.test_server import configuration, running, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from octavo_router.app import App
    from octavo_router.config.settings import RouterConfig
    from octavo_router.routing.decision import Decision
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.outcome import Outcome
    from octavo_router.routing.request import RouteRequest
    from tests.fakes.upstream import Peer, Received


def with_adapters(
    ports: Sequence[int], *names: str, slots: int = 4, more: str = ""
) -> RouterConfig:
    adapters = "".join(f"\n    - {{name: {name}, uri: /adapters/{name}}}" for name in names)
    text = f"""
routing:
  pools:
  - name: default
    adapter_slots: {slots}
    adapters: {adapters or "[]"}
{more}"""
    return configuration(*ports, text=text)


@asynccontextmanager
async def routing(
    *servers: LoraServer, adapters: Sequence[str], slots: int = 4, more: str = ""
) -> AsyncIterator[tuple[App, RawClient]]:
    async with AsyncExitStack() as stack:
        ports = []
        for server in servers:
            upstream = await stack.enter_async_context(ScriptedUpstream(server))
            ports.append(upstream.port)
        config = with_adapters(ports, *adapters, slots=slots, more=more)
        app, server_ = await stack.enter_async_context(running(config))
        client = await stack.enter_async_context(await RawClient.open(server_.port))
        await until_ready(app)
        yield app, client


class KeyWatch:
    """A dispatcher's observer that looks at route keys."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def placed(self, request: RouteRequest, decision: Decision) -> None:
        self.keys[request.model] = request.keys

    def finished(self, lease: Lease, outcome: Outcome) -> None: ...


def loads(*servers: LoraServer) -> list[str]:
    return [line for server in servers for line in server.log if line.startswith("load")]


@on_loop
async def test_an_adapter_is_a_model_of_its_base_models_pool():
    server = LoraServer()
    async with routing(server, adapters=["law"]) as (_, client):
        answer = await client.ask(chat(model="law"))
        assert answer.status == 200
        assert answer.json["model"] == "law"
        assert server.loaded == {"law": "/adapters/law"}
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json["data"]}
        assert cards["law"]["parent"] == BASE
        assert cards[BASE]["parent"] is None


@on_loop
async def test_many_requests_wait_for_one_load():
    server = LoraServer(load_s=0.1)
    async with routing(server, adapters=["law"]) as (app, client), AsyncExitStack() as stack:
        port = client.writer.get_extra_info("peername")[1]
        clients = [await stack.enter_async_context(await RawClient.open(port)) for _ in range(8)]
        answers = await asyncio.gather(
            *(one.ask(chat(model="law", stream=n % 2 == 0)) for n, one in enumerate(clients))
        )
        assert [answer.status for answer in answers] == [200] * 8
        assert loads(server) == ["load law"]
        assert not app.proxy.exchanges


@on_loop
async def test_a_failed_load_is_explained_in_the_engines_words_and_others_are_served():
    why = "rank 128 is greater than max_lora_rank 64"
    servers = [LoraServer(broken={"/adapters/big": why}) for _ in range(2)]
    async with routing(*servers, adapters=["big", "law"]) as (app, client):
        answer = await client.ask(chat(model="big"))
        assert (answer.status, answer.code) == (503, "adapter_not_loaded")
        assert why in answer.json["error"]["message"]
        assert answer.json["error"]["param"] == "model"
        assert int(answer.header("retry-after") or 0) >= 1
        assert (await client.ask(chat(model="law"))).status == 200
        num_tries = loads(*servers).count("load big")
        assert num_tries == 2
        assert (await client.ask(chat(model="big"))).status == 503
        assert loads(*servers).count("load big") == num_tries  # refused without another try
        (state,) = [s for s in app.adapters.states("default") if s.name == "big"]
        assert (state.state, state.reason) == ("failed", why)


@on_loop
async def test_a_server_that_can_serves_what_another_could_not_load():
    servers = [LoraServer(broken={"/adapters/law": "out of memory"}), LoraServer()]
    async with routing(*servers, adapters=["law"]) as (_, client):
        for _ in range(4):
            assert (await client.ask(chat(model="law"))).status == 200
        assert servers[1].num_answers == 4


@pytest.mark.slow
@on_loop
async def test_more_adapters_than_slots_take_turns():
    server = LoraServer()
    names = [f"a{number}" for number in range(5)]
    async with routing(server, adapters=names, slots=2) as (_, client):
        for name in names:
            assert (await client.ask(chat(model=name))).json["model"] == name
            assert len(server.loaded) <= 2


@on_loop
async def test_an_adapter_that_somebody_else_unloaded_is_loaded_again_and_nothing_is_lost():
    server = LoraServer()
    async with routing(server, adapters=["law"]) as (_, client):
        assert (await client.ask(chat(model="law"))).status == 200
        del server.loaded["law"]
        assert (await client.ask(chat(model="law"))).status == 200
        assert loads(server) == ["load law", "load law"]


@on_loop
async def test_an_adapter_that_is_there_already_is_used():
    server = LoraServer(loaded={"law": "/adapters/law"})
    async with routing(server, adapters=["law"]) as (_, client):
        assert (await client.ask(chat(model="law"))).status == 200
        assert server.log == []


@pytest.mark.slow
@on_loop
async def test_a_changed_configuration_loads_and_unloads():
    server = LoraServer()
    async with routing(server, adapters=["law", "tax"]) as (app, client):
        await until(lambda: sorted(server.loaded) == ["law", "tax"])
        port = next(iter(app.registry.endpoints.values())).spec.address.port
        app.apply(with_adapters([port], "tax", "med"))
        await until(lambda: sorted(server.loaded) == ["med", "tax"])
        answer = await client.ask(chat(model="law"))
        assert (answer.status, answer.code) == (404, "model_not_found")
        assert (await client.ask(chat(model="med"))).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("is_loading", [False, True])
@on_loop
async def test_other_files_under_the_same_name_are_loaded_anew(is_loading: bool):
    server = LoraServer(load_s=0.1)
    async with routing(server, adapters=["law"]) as (app, _):
        if is_loading:  # the change comes while the first files are still loaded
            await until(lambda: server.log == ["load law"])
        else:
            await until(lambda: app.adapters.states("default")[0].state == "loaded")
        port = next(iter(app.registry.endpoints.values())).spec.address.port
        config = with_adapters([port], "law")
        (pool,) = config.routing.pools
        pool = replace(pool, adapters=(replace(pool.adapters[0], uri="/adapters/law-2"),))
        app.apply(replace(config, routing=replace(config.routing, pools=(pool,))))
        await until(lambda: server.loaded == {"law": "/adapters/law-2"})
        assert server.log == ["load law", "load law"]  # in place: requests go on meanwhile


@on_loop
async def test_a_pool_may_say_what_adapters_it_has():
    server = LoraServer()
    async with routing(server, adapters=[]) as (app, client):
        route = PoolRoute(
            "default", names=(BASE,), adapters=(AdapterConfig(name="law", uri="/adapters/law"),)
        )
        app._take_pool_routes({"default": route})
        assert (await client.ask(chat(model="law"))).status == 200
        app._take_pool_routes({"default": PoolRoute("default", names=(BASE,))})
        await until(lambda: not server.loaded)


@on_loop
async def test_keys_allow_adapters_by_name():
    server = LoraServer()
    more = "flow:\n  keys:\n  - {tenant: t, key: k1, models: [law]}\n"
    async with routing(server, adapters=["law", "tax"], more=more) as (_, client):
        key = "authorization: Bearer k1\r\n"
        assert (await client.ask(chat(model="law"), more=key)).status == 200
        answer = await client.ask(chat(model="tax"), more=key)
        assert (answer.status, answer.code) == (403, "model_not_allowed")


@on_loop
async def test_a_prompt_under_an_adapter_is_not_found_under_another():
    """Route keys of equal prompts differ by adapter, and are those that engines label."""
    server = LoraServer()
    async with routing(server, adapters=["law", "tax"]) as (app, client):
        app.dispatcher.observer = watch = KeyWatch()
        for name in (BASE, "law", "tax"):
            assert (await client.ask(chat("x" * 300, model=name))).status == 200
    assert len({*watch.keys.values()}) == 3
    body = chat("x" * 300, model="law")
    assert watch.keys["law"] == route_keys.pack_keys(route_keys.keys_of(body, "chat", "law"))


@on_loop
async def test_a_client_that_leaves_while_its_adapter_loads_leaves_nothing():
    server = LoraServer(load_s=0.3)
    async with routing(server, adapters=["law"]) as (app, client):
        await client.post(chat(model="law"))
        await until(lambda: bool(app.proxy.exchanges))
        client.reset()
        await until(lambda: not app.proxy.exchanges)
        await until(lambda: "law" in server.loaded)


def test_a_configuration_of_adapters_is_checked():
    def load(adapters: str, slots: int = 16) -> None:
        text = f"routing: {{pools: [{{name: p, adapter_slots: {slots}, adapters: {adapters}}}]}}"
        load_config(text=text)

    with pytest.raises(ConfigInvalid, match="there twice"):
        load("[{name: a, uri: /x}, {name: a, uri: /y}]")
    with pytest.raises(ConfigInvalid, match="uri: must not be empty"):
        load("[{name: a}]")
    with pytest.raises(ConfigInvalid, match="2 are pinned or canaries, and adapter_slots is 1"):
        load("[{name: a, uri: /x, pinned: true}, {name: b, uri: /y, pinned: true}]", slots=1)


# -- revisions


def with_revisions(old: int, new: int) -> RouterConfig:
    text = f"""
discovery:
  upstreams:
  - {{url: "http://127.0.0.1:{old}", pool: default, revision: old}}
  - {{url: "http://127.0.0.1:{new}", pool: default, revision: new}}
models:
- name: {BASE}
  backends:
  - {{pool: default, revision: old, weight: 50}}
  - {{pool: default, revision: new, weight: 50}}
routing:
  pools:
  - {{name: default, adapters: [{{name: law, uri: /adapters/law}}]}}
"""
    return configuration(text=text)


def outcomes(app: App) -> dict[str, tuple[int, int]]:
    (pool,) = app._state.state().pools
    return {one.revision: (one.requests, one.errors) for one in pool.revisions}


@pytest.mark.parametrize("load_s", [0.0, 0.05])
@on_loop
async def test_what_a_revision_cannot_load_another_serves_and_it_is_the_first_ones_failure(
    load_s: float,
):
    """No client is harmed by the trial, and the trial is judged by what it could not do."""
    old, new = LoraServer(), LoraServer(broken={"/adapters/law": "rank 128"}, load_s=load_s)
    async with (
        ScriptedUpstream(old) as first,
        ScriptedUpstream(new) as second,
        running(with_revisions(first.port, second.port)) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        await until_ready(app)
        await until(lambda: len(app.registry.routable("default")) == 2)
        num = 40
        for number in range(num):
            answer = await client.ask(chat(model="law"), more=f"x-request-id: {number}\r\n")
            assert answer.status == 200, answer.body
        assert loads(new) == ["load law"]
        counted = outcomes(app)
        assert counted["old"] == (num, 0)
        failed, errors = counted["new"]
        assert 5 < failed == errors < 35  # its share of them
        # Where none can, the client gets the reason.
        old.broken = {"/adapters/law": "rank 128"}
        old.loaded.clear()
        for endpoint in app.registry.routable("default"):
            app.adapters.unloaded(endpoint, "law")
        answer = await client.ask(chat(model="law"))
        assert (answer.status, answer.code) == (503, "adapter_not_loaded")


@on_loop
async def test_a_request_waits_for_a_revision_that_is_still_loading_and_then_for_its_adapter():
    is_up = asyncio.Event()
    new = LoraServer(load_s=0.02)

    async def slow_start(peer: Peer, request: Received) -> None:
        await is_up.wait()
        await new(peer, request)

    text = f"""
discovery:
  upstreams: [{{url: "http://127.0.0.1:PORT", pool: default, revision: new, names: [{BASE}]}}]
models:
- {{name: {BASE}, backends: [{{pool: default, revision: new, weight: 100}}]}}
routing:
  pools:
  - {{name: default, adapters: [{{name: law, uri: /adapters/law}}]}}
"""
    async with (
        ScriptedUpstream(slow_start) as upstream,
        running(configuration(text=text.replace("PORT", str(upstream.port)))) as (app, server),
        await RawClient.open(server.port) as client,
    ):
        asking = asyncio.create_task(client.ask(chat(model="law")))
        await until(lambda: app.gate.demand("default").held == 1)
        assert not new.log
        is_up.set()
        answer = await asking
        assert (answer.status, answer.json["model"]) == (200, "law")
        assert new.log == ["load law"]
        assert outcomes(app) == {"new": (1, 0)}
