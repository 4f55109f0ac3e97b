"""Adapters that pools ask for themselves: whose names they are, and what pool they belong to."""

from __future__ import annotations

import json

import pytest

from octavo_router.config.settings import AdapterConfig, PoolConfig, RouterConfig, RoutingConfig
from octavo_router.discovery.kubernetes.objects import KubernetesService, Meta
from octavo_router.discovery.kubernetes.routing import RoutingInvalid, pool_route, routing_of
from octavo_router.discovery.pool_config import (
    discovered_models,
    discovered_pools,
    foreign_claims,
)
from octavo_router.discovery.source import Claim, PoolRoute
from octavo_router.endpoints.registry import Registry
from octavo_router.errors import Rejected
from octavo_router.routing.models import Models
from tests.fakes.endpoints import make_spec

LAW = AdapterConfig(name="law", uri="/adapters/law")


def route(pool: str, *names: str, adapters: tuple[AdapterConfig, ...] = (), created: str = "1"):
    namespace = pool.partition("/")[0]
    return PoolRoute(pool, names, claim=Claim(created, namespace), adapters=adapters)


def models_of(*routes: PoolRoute) -> Models:
    by_pool = {each.pool: each for each in routes}
    registry = Registry()
    specs = [make_spec(n, pool=each.pool, names=each.names) for n, each in enumerate(routes)]
    for endpoint in registry.replace("test", specs).added:
        registry.report(endpoint, "ready")
    models = Models(registry)
    models.replace(
        discovered_models(by_pool),
        {pool: each.claim for pool, each in by_pool.items()},
        discovered_pools(by_pool, RouterConfig(), ()),
    )
    return models


def test_a_request_by_an_adapters_name_goes_to_its_pool():
    models = models_of(route("ns/a", "base", adapters=(LAW,)), route("ns/b", "other"))
    found = models.resolve("law")
    assert (found.pool, found.adapter, found.upstream_model) == ("ns/a", "law", "")
    assert models.adapter_contents == {"law": "law"}
    cards = {card.name: card.parent for card in models.cards()}
    assert cards == {"base": None, "law": "base", "other": None}
    with pytest.raises(Rejected, match="does not exist"):
        models.resolve("tax")


def test_a_name_belongs_to_the_namespace_that_asked_first():
    older = route("old/a", "base", adapters=(LAW,), created="1")
    younger = route("new/b", "base-2", adapters=(LAW,), created="2")
    assert models_of(younger, older).resolve("law").pool == "old/a"
    routes = {each.pool: each for each in (younger, older)}
    assert foreign_claims(routes) == [("new/b", "law", "old")]
    pools = {pool.name: pool.adapters for pool in discovered_pools(routes, RouterConfig(), ())}
    assert pools == {"old/a": (LAW,)}


def test_a_model_of_another_namespace_is_not_taken_over_by_an_adapter():
    older = route("old/a", "law", created="1")
    younger = route("new/b", "base", adapters=(LAW,), created="2")
    found = models_of(older, younger).resolve("law")
    assert (found.pool, found.adapter) == ("old/a", "")


def test_what_the_configuration_says_of_a_pool_comes_first():
    own = AdapterConfig(name="own", uri="/own")
    for pool, adapters in (
        (PoolConfig(name="ns/a", policy="session"), (LAW,)),
        (PoolConfig(name="ns/a", adapters=(own,)), (own,)),
    ):
        config = RouterConfig(routing=RoutingConfig(pools=(pool,)))
        (found,) = discovered_pools({"ns/a": route("ns/a", adapters=(LAW,))}, config, ())
        assert (found.policy, found.adapters) == (pool.policy, adapters)


def annotated(**routing: object) -> KubernetesService:
    meta = Meta(name="a", namespace="ns", annotations={"octavo.dev/routing": json.dumps(routing)})
    return KubernetesService(metadata=meta)


def test_the_annotation_brings_them():
    service = annotated(
        names=["base"], adapterSlots=8,
        adapters=[{"name": "law", "uri": "/l"}, {"name": "tax", "uri": "/t", "pinned": True}],
    )  # fmt: skip
    routing = routing_of(service)
    assert routing is not None
    found = pool_route(service, routing)
    assert found.adapter_slots == 8
    assert found.adapters == (
        AdapterConfig(name="law", uri="/l"), AdapterConfig(name="tax", uri="/t", pinned=True),
    )  # fmt: skip
    with pytest.raises(RoutingInvalid):
        routing_of(annotated(adapters=[{"name": "law"}]))
    with pytest.raises(RoutingInvalid):
        routing_of(annotated(adapterSlots=0))


def test_the_annotation_brings_canaries():
    law = {"name": "law", "uri": "/l"}
    service = annotated(adapters=[law, {"name": "b", "uri": "/b", "canary": {"of": "law"}}])
    routing = routing_of(service)
    assert routing is not None
    (_, found) = pool_route(service, routing).adapters
    assert found == AdapterConfig(name="b", uri="/b", canary_of="law", canary_percent=10.0)
    for of, problem in (("tax", "must be in the list"), ("b", "no canary")):
        adapters = [law, {"name": "b", "uri": "/b", "canary": {"of": of}}]
        with pytest.raises(RoutingInvalid, match=problem):
            routing_of(annotated(adapters=adapters))
