"""An adapter that gets a share of another's requests: which, whose, and from when on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.config.load import load_config
from octavo_router.config.settings import AdapterConfig, MirrorConfig, PoolConfig, ServedModelConfig
from octavo_router.endpoints.registry import Registry
from octavo_router.errors import ConfigInvalid
from octavo_router.routing.models import Models, _point
from tests.fakes.endpoints import make_spec
from tests.fakes.facts import until
from tests.fakes.http_client import RawClient, chat
from tests.fakes.lora_server import LoraServer
from tests.fakes.router_rig import on_loop
from tests.fakes.upstream import ScriptedUpstream
from tests.router.test_server import configuration, running, until_ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_router.routing.decision import Decision
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.models import ModelRoute
    from octavo_router.routing.outcome import Outcome
    from octavo_router.routing.request import RouteRequest

LAW = AdapterConfig(name="law", uri="/law")
NEXT = AdapterConfig(name="next", uri="/next", canary_of="law", canary_percent=20.0)
POOL = PoolConfig(name="ns/a", adapters=(LAW, NEXT))


class World:
    """A pool's engine, which has both adapters, and another namespace's."""

    def __init__(self, *loaded: str, config: Sequence[ServedModelConfig] = ()) -> None:
        self.registry = Registry()
        specs = [make_spec(0, pool="ns/a"), make_spec(1, pool="other/b")]
        for endpoint in self.registry.replace("test", specs).added:
            endpoint.names = ("base",) if endpoint.pool == "ns/a" else ("law-base",)
            self.registry.report(endpoint, "ready")
        self.engine, self.other = self.registry.endpoints.values()
        self.has(*loaded)
        self.models = Models(self.registry, config, [POOL])

    def has(self, *loaded: str) -> None:
        self.engine.adapters = frozenset(loaded)
        self.registry.changed(self.engine)

    def routes(self, name: str, count: int = 4000, **fields: Any) -> list[ModelRoute]:
        return [
            self.models.resolve(name, **({"request_id": str(n)} | fields)) for n in range(count)
        ]


def test_a_share_of_the_requests_goes_to_it():
    routes = World("law", "next").routes("law")
    adapters = [route.adapter for route in routes]
    assert set(adapters) == {"law", "next"}
    assert 0.17 < adapters.count("next") / len(adapters) < 0.23
    assert {(r.pool, r.adapter, r.upstream_model, r.is_canary) for r in routes} == {
        ("ns/a", "law", "", False), ("ns/a", "next", "next", True),
    }  # fmt: skip


def test_a_session_stays_on_its_side_also_when_the_share_grows():
    world = World("law", "next")
    before = {s: world.models.resolve("law", session=str(s)).adapter for s in range(500)}
    for session, adapter in before.items():
        assert {r.adapter for r in world.routes("law", 20, session=str(session))} == {adapter}
    grown = replace(NEXT, canary_percent=50.0)
    world.models.replace([], pools=[replace(POOL, adapters=(LAW, grown))])
    after = {s: world.models.resolve("law", session=str(s)).adapter for s in range(500)}
    moved = {(before[s], after[s]) for s in before}
    assert moved == {("law", "law"), ("law", "next"), ("next", "next")}


def test_clients_may_name_either():
    world = World("law", "next")
    assert {r.adapter for r in world.routes("next", 100)} == {"next"}
    assert not any(r.is_canary for r in world.routes("next", 100))
    # A body that cannot be changed on the way keeps its name.
    assert {r.adapter for r in world.routes("law", 100, is_fixed=True)} == {"law"}
    assert {card.name for card in world.models.cards()} == {"base", "law", "law-base", "next"}


def test_the_outcomes_of_both_are_compared_and_no_others():
    world = World("law", "next")
    assert all(route.is_trial for route in world.routes("law", 100))
    assert not any(route.is_trial for route in world.routes("next", 100))
    assert not any(route.is_trial for route in world.routes("base", 100))
    assert not any(route.is_trial for route in World("law").routes("law", 100))


def test_one_that_no_engine_has_gets_nothing():
    world = World("law")
    assert {r.adapter for r in world.routes("law", 200)} == {"law"}
    world.has("law", "next")
    assert {r.adapter for r in world.routes("law", 200)} == {"law", "next"}
    world.has("law")
    assert {r.adapter for r in world.routes("law", 200)} == {"law"}


def test_an_alias_is_shared_as_what_it_means_and_copies_are_made_of_both():
    mirrors = (MirrorConfig(pool="b", percent=100.0),)
    config = [
        ServedModelConfig(name="legal", alias_of="law"),
        ServedModelConfig(name="law", mirrors=mirrors),
    ]
    world = World("law", "next", config=config)
    for name in ("legal", "law"):
        routes = world.routes(name, 200)
        assert {route.adapter for route in routes} == {"law", "next"}
        assert all(route.copies for route in routes)


def test_it_takes_no_other_owners_requests():
    """`law` is a model that other engines serve, or an adapter of an older pool elsewhere."""
    world = World("law", "next")
    world.other.names = ("law",)
    world.registry.changed(world.other)
    assert {(r.pool, r.adapter) for r in world.routes("law", 100)} == {("other/b", "")}

    world = World("law", "next")
    world.other.adapters = frozenset({"law"})
    older = PoolConfig(name="other/b", adapters=(LAW,))
    claims = {"ns/a": ("2026", "ns"), "other/b": ("2025", "other")}
    world.models.replace([], claims, [POOL, older])
    assert {(r.pool, r.adapter) for r in world.routes("law", 100)} == {("other/b", "law")}


@pytest.mark.parametrize(
    ("canaries", "message"),
    [
        ("{name: b, uri: /b, canary_of: tax}", "'tax'.* must be in the list and no canary"),
        ("{name: b, uri: /b, canary_of: b}", "must be in the list and no canary"),
        (
            "{name: b, uri: /b, canary_of: law}, {name: c, uri: /c, canary_of: law}",
            "has 2 canaries; it can have one",
        ),
        ("{name: b, uri: /b, canary_of: law, canary_percent: 101.0}", "canary_percent"),
    ],
)
def test_a_configuration_that_cannot_work(canaries: str, message: str):
    text = f"""
routing:
  pools:
  - {{name: default, adapters: [{{name: law, uri: /l}}, {canaries}]}}
"""
    with pytest.raises(ConfigInvalid, match=message):
        load_config(text=text)


class KeysByAdapter:
    """A dispatcher's observer that looks at route keys."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def placed(self, request: RouteRequest, decision: Decision) -> None:
        self.keys[request.adapter] = request.keys

    def finished(self, lease: Lease, outcome: Outcome) -> None: ...


@pytest.mark.slow
@on_loop
async def test_the_whole_router_tries_it_and_fails_nobody_where_it_cannot_be_loaded():
    """Loaded on its own, named to engines, counted by its name, and promoted by other files."""
    server = LoraServer(broken={"/broken": "rank 128 is too high"})
    text = """
routing:
  pools:
  - name: default
    adapters:
    - {name: law, uri: /law}
    - {name: next, uri: URI, canary_of: law, canary_percent: 40.0}
"""
    async with ScriptedUpstream(server) as upstream:
        config = configuration(upstream.port, text=text.replace("URI", "/broken"))
        async with (
            running(config) as (app, port_of),
            await RawClient.open(port_of.port) as client,
        ):
            await until_ready(app)

            chosen = next(s for s in map(str, range(99)) if _point("law\0canary", s) < 0.4)

            async def ask(number: int) -> str:
                line = f"x-request-id: {number}\r\n"
                answer = await client.ask(chat("a" * 200, model="law"), more=line)
                assert answer.status == 200, answer.body
                return str(json.loads(answer.body)["model"])

            await until(lambda: "load next" in server.log)
            assert {await ask(number) for number in range(20)} == {"law"}
            app.apply(configuration(upstream.port, text=text.replace("URI", "/next")))
            await until(lambda: server.loaded == {"law": "/law", "next": "/next"})
            await until(lambda: app.models.resolve("law", session=chosen).is_canary)
            app.dispatcher.observer = watch = KeysByAdapter()
            answers = [await ask(number) for number in range(40)]
            assert 5 < answers.count("next") < 30
            own = {"law": watch.keys["law"], "next": watch.keys["next"]}
            await client.ask(chat("a" * 200, model="next"))
            assert watch.keys == own and own["law"] != own["next"]
            metrics = (await client.get("/metrics")).body.decode()
            assert 'octavo_router_adapter_loads_total{pool="default"} 2.0' in metrics
            assert 'octavo_router_adapter_load_failures_total{pool="default"} 1.0' in metrics
            counted = [line for line in metrics.splitlines() if 'model="next"' in line]
            assert any(line.startswith("octavo_router_requests_total") for line in counted)
            # What the operator compares: the forty that were shared, and no request by `next`.
            (pool,) = app._state.state().pools
            compared = {one.revision: one.requests for one in pool.adapter_trials}
            assert compared == {"law": answers.count("law"), "next": answers.count("next")}
            assert all(one.errors == 0 and one.ttft_count for one in pool.adapter_trials)
