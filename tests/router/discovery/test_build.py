"""From settings to sources, and from what pools want to settings."""

from __future__ import annotations

import pytest

from octavo_router.config.settings import (
    BackendConfig,
    DiscoveryConfig,
    KubernetesConfig,
    PoolConfig,
    RouterConfig,
    RoutingConfig,
    ServedModelConfig,
    UpstreamConfig,
)
from octavo_router.discovery.build import make_sources
from octavo_router.discovery.kubernetes.account import in_cluster
from octavo_router.discovery.pool_config import (
    discovered_models,
    discovered_pools,
    foreign_claims,
    owners_of,
)
from octavo_router.discovery.source import Claim, PoolRoute
from octavo_router.errors import ConfigInvalid
from octavo_router.metrics import RouterMetrics


def names(config: DiscoveryConfig) -> list[str]:
    return [source.name for source in make_sources(config, RouterMetrics(), {})]


def test_each_setting_is_a_source():
    assert names(DiscoveryConfig()) == ["static"]
    kubernetes = KubernetesConfig(enabled=True, api="http://127.0.0.1:8001")
    config = DiscoveryConfig(
        upstreams=(UpstreamConfig(url="http://a"),), file="upstreams.yaml", kubernetes=kubernetes
    )
    assert names(config) == ["static", "file", "kubernetes"]


def test_outside_of_a_cluster_somebody_has_to_say_where_the_api_is(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"discovery\.kubernetes"):
        names(DiscoveryConfig(kubernetes=KubernetesConfig(enabled=True)))
    with pytest.raises(ConfigInvalid, match=r"kubernetes\.api"):
        names(DiscoveryConfig(kubernetes=KubernetesConfig(enabled=True, api="kube:6443")))
    with pytest.raises(ConfigInvalid):
        in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


ROUTES = {
    "a/canary": PoolRoute("a/canary", ("m", "alias"), "random", {"r1": 90.0, "r2": 10.0}),
    "b/plain": PoolRoute("b/plain", ("m",), "unheard-of"),
    "c/zero": PoolRoute("c/zero", ("z",), "prefix-load", {"r1": 0.0}),
}


def test_pools_claim_names_by_their_weights_and_share_those_that_several_claim():
    canary = (
        BackendConfig(pool="a/canary", revision="r1", weight=0.9),
        BackendConfig(pool="a/canary", revision="r2", weight=0.1),
    )
    mine = ServedModelConfig(name="z", alias_of="m")
    assert discovered_models(ROUTES, (mine,)) == (
        mine,
        ServedModelConfig(name="m", backends=(*canary, BackendConfig(pool="b/plain"))),
        ServedModelConfig(name="alias", backends=canary),
    )
    assert discovered_models({"c/zero": ROUTES["c/zero"]}) == (
        ServedModelConfig(name="z", backends=(BackendConfig(pool="c/zero"),)),
    )


def test_a_name_belongs_to_the_namespace_with_the_oldest_claim():
    """Anybody who may annotate a Service would get a share of another tenant's prompts."""
    victim = PoolRoute("a/chat", ("chat",), claim=Claim("2026-01-02T00:00:00Z", "a"))
    sister = PoolRoute("a/chat-2", ("chat",), claim=Claim("2026-03-01T00:00:00Z", "a"))
    thief = PoolRoute("b/x", ("chat", "own"), claim=Claim("2026-01-03T00:00:00Z", "b"))
    listed = PoolRoute("file", ("chat",))
    routes = {route.pool: route for route in (thief, sister, victim, listed)}
    assert discovered_models(routes) == (
        ServedModelConfig(
            name="chat",
            backends=tuple(BackendConfig(pool=pool) for pool in ("a/chat", "a/chat-2", "file")),
        ),
        ServedModelConfig(name="own", backends=(BackendConfig(pool="b/x"),)),
    )
    assert foreign_claims(routes) == [("b/x", "chat", "a")]
    del routes["a/chat"]  # now the other's is the oldest
    assert owners_of(routes)["chat"] == "b"


def test_a_policy_that_nobody_knows_is_passed_over():
    mine = PoolConfig(name="c/zero", policy="least-load")
    config = RouterConfig(routing=RoutingConfig(pools=(mine,)))
    policies = {"random", "prefix-load", "least-load"}
    assert discovered_pools(ROUTES, config, policies) == (
        mine,
        PoolConfig(name="a/canary", policy="random"),
    )
