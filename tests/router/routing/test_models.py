"""Model names: aliases, canaries by weight, mirrors, adapters, and what does not exist."""

import pytest

from octavo_router.config.settings import BackendConfig, MirrorConfig, ServedModelConfig
from octavo_router.endpoints.registry import Registry
from octavo_router.errors import Rejected
from octavo_router.routing.models import ModelRoute, Models
from tests.fakes.endpoints import make_spec


def registry_of(*specs):
    registry = Registry()
    for endpoint in registry.replace("test", specs).added:
        registry.report(endpoint, "ready")
    return registry


def test_a_served_name_means_its_pool():
    models = Models(registry_of(make_spec(0, pool="a", names=("smollm2", "small"))))
    assert models.resolve("smollm2") == ModelRoute("a")
    assert models.resolve("small") == ModelRoute("a")


def in_namespace(number, pool, **fields):
    namespace = pool.partition("/")[0]
    return make_spec(number, pool=pool, labels=(("namespace", namespace), ("pod", "p")), **fields)


def test_a_name_that_engines_of_two_namespaces_tell_belongs_to_the_older_pool():
    """Whoever has more engines would get the other tenant's prompts."""
    registry = registry_of(
        in_namespace(0, "b/thief", names=("chat",)),
        in_namespace(1, "b/thief", names=("chat",)),
        in_namespace(2, "a/chat", names=("chat",)),
    )
    models = Models(registry)
    models.replace((), {"a/chat": ("2026-01-01", "a"), "b/thief": ("2026-01-02", "b")})
    assert models.resolve("chat") == ModelRoute("a/chat")
    assert models.pools_of("chat") == ["a/chat"]
    models.replace((), {"a/chat": ("2026-01-01", "a")})  # pods without a Service come last
    assert models.resolve("chat") == ModelRoute("a/chat")
    models.replace((), {"a/chat": ("2026-01-03", "a"), "b/thief": ("2026-01-02", "b")})
    assert models.resolve("chat") == ModelRoute("b/thief")


def test_pools_that_are_in_no_namespace_stand_in_for_any():
    registry = registry_of(
        in_namespace(0, "a/chat", names=("chat",)),
        make_spec(1, pool="listed", names=("chat",)),
        make_spec(2, pool="listed", names=("chat",)),
    )
    models = Models(registry)
    models.replace((), {"a/chat": ("2026-01-01", "a")})
    assert models.pools_of("chat") == ["a/chat", "listed"]


def test_an_alias_is_rewritten_for_the_engine():
    config = [
        ServedModelConfig(name="gpt-4o", alias_of="chat"),
        ServedModelConfig(name="chat", alias_of="smollm2"),
    ]
    models = Models(registry_of(make_spec(0, names=("smollm2",))), config)
    assert models.resolve("gpt-4o") == ModelRoute("pool", upstream_model="smollm2")


def test_what_does_not_exist_is_refused_with_what_does():
    models = Models(registry_of(make_spec(0, names=("smollm2",))))
    with pytest.raises(Rejected) as caught:
        models.resolve("gpt-4o")
    refused = caught.value
    assert (refused.status, refused.code, refused.param) == (404, "model_not_found", "model")
    assert refused.message == "The model `gpt-4o` does not exist. There are: `smollm2`."


def test_before_any_engine_came_nothing_exists():
    with pytest.raises(Rejected, match="No model is being served yet"):
        Models(Registry()).resolve("smollm2")


def unheard(*specs):
    registry = Registry()
    registry.replace("test", specs)
    return registry


ALIAS = ServedModelConfig(name="gpt-4o", alias_of="smollm2")


def test_requests_wait_for_engines_that_were_not_heard_from():
    registry = unheard(make_spec(0, names=()))
    models = Models(registry, [ALIAS])
    assert models.resolve("smollm2") == ModelRoute("pool", is_known=False)
    assert models.resolve("gpt-4o") == ModelRoute("pool", upstream_model="smollm2")
    (endpoint,) = registry.endpoints.values()
    endpoint.names = ("smollm2",)
    registry.changed(endpoint)
    assert models.resolve("smollm2") == ModelRoute("pool")
    with pytest.raises(Rejected, match="does not exist"):
        models.resolve("smollm3")


def test_only_what_is_configured_waits_while_other_models_are_served():
    registry = registry_of(make_spec(0, names=("other",)))
    registry.replace("more", [make_spec(1, pool="b", names=())])
    models = Models(registry, [ALIAS])
    assert models.resolve("gpt-4o") == ModelRoute("b", upstream_model="smollm2")
    with pytest.raises(Rejected, match=r"`smollm2` does not exist\. There are: `other`"):
        models.resolve("smollm2")


def test_with_several_pools_not_heard_from_nobody_knows_where_to_wait():
    models = Models(unheard(make_spec(0, names=()), make_spec(1, pool="b", names=())))
    with pytest.raises(Rejected) as caught:
        models.resolve("smollm2")
    refused = caught.value
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "no_endpoints", 1.0)


def test_what_is_refused_is_not_among_what_there_is():
    models = Models(registry_of(make_spec(0, names=("other",))), [ALIAS])
    with pytest.raises(Rejected) as caught:
        models.resolve("gpt-4o")
    assert caught.value.message == (
        "The model `gpt-4o` stands for `smollm2`, which no engine serves. There are: `other`."
    )


def test_a_request_without_a_model_means_the_only_one():
    registry = registry_of(make_spec(0, names=("smollm2",)))
    models = Models(registry)
    assert models.resolve("") == ModelRoute("pool", upstream_model="")
    registry.replace("more", [make_spec(1, pool="b", names=("other",))])
    with pytest.raises(Rejected) as caught:
        models.resolve("")
    assert (caught.value.status, caught.value.code) == (400, "missing_model")


def canary(weight):
    return ServedModelConfig(
        name="m",
        backends=(
            BackendConfig(pool="a", revision="r1", weight=100 - weight),
            BackendConfig(pool="a", revision="r2", weight=weight),
        ),
    )


def two_revisions():
    return registry_of(
        make_spec(0, pool="a", names=("m",), revision="r1"),
        make_spec(1, pool="a", names=("m",), revision="r2"),
    )


@pytest.mark.parametrize("weight", [0, 1, 10, 50, 99])
def test_weights_hold_within_a_hundredth(weight):
    models = Models(two_revisions(), [canary(weight)])
    routes = [models.resolve("m", request_id=f"req-{i}").revision for i in range(10_000)]
    assert abs(routes.count("r2") / 10_000 - weight / 100) <= 0.01
    if weight == 0:
        assert "r2" not in routes


def test_sessions_stick_and_ids_repeat():
    models = Models(two_revisions(), [canary(50)])
    for session in ("alice", "bob", "carol", "dave"):
        found = {
            models.resolve("m", request_id=str(i), session=session).revision for i in range(20)
        }
        assert len(found) == 1
    again = Models(two_revisions(), [canary(50)])
    for i in range(50):
        request_id = f"id-{i}"
        assert models.resolve("m", request_id=request_id) == again.resolve(
            "m", request_id=request_id
        )


def test_a_backend_without_engines_leaves_its_share_to_the_others():
    registry = two_revisions()
    models = Models(registry, [canary(50)])
    registry.report(registry.endpoints["pod-1"], "down")
    found = {models.resolve("m", request_id=str(i)).revision for i in range(50)}
    assert found == {"r1"}
    registry.report(registry.endpoints["pod-0"], "down")  # then the weights decide who waits where
    found = {models.resolve("m", request_id=str(i)).revision for i in range(50)}
    assert found == {"r1", "r2"}


def test_a_scaled_down_model_is_still_known_by_its_backend():
    config = [ServedModelConfig(name="m", backends=(BackendConfig(pool="a"),))]
    assert Models(Registry(), config).resolve("m") == ModelRoute("a")


def test_a_backend_that_knows_the_model_by_another_name_is_told_that_one():
    registry = registry_of(make_spec(0, pool="a", names=("weights-v2",)))
    config = [ServedModelConfig(name="m", backends=(BackendConfig(pool="a"),))]
    assert Models(registry, config).resolve("m").upstream_model == "weights-v2"


def test_mirrors_get_their_share_of_copies():
    registry = registry_of(make_spec(0, pool="a", names=("m",)))
    mirrors = (MirrorConfig(pool="b", percent=20.0), MirrorConfig(pool="c", percent=100.0))
    models = Models(registry, [ServedModelConfig(name="m", mirrors=mirrors)])
    routes = [models.resolve("m", request_id=str(i)) for i in range(5000)]
    assert {route.pool for route in routes} == {"a"}
    copies = [copy.pool for route in routes for copy in route.copies]
    assert copies.count("c") == 5000
    assert 0.18 < copies.count("b") / 5000 < 0.22


def test_an_adapter_is_a_model_with_a_parent():
    registry = registry_of(make_spec(0, names=("base", "sql-lora")))
    endpoint = registry.endpoints["pod-0"]
    endpoint.adapters = frozenset({"sql-lora"})
    endpoint.max_model_len = 2048
    endpoint.vocab_size = 512
    registry.changed(endpoint)
    models = Models(registry)
    assert models.resolve("sql-lora") == ModelRoute("pool", adapter="sql-lora")
    assert [card.to_json(7) for card in models.cards()] == [
        {
            "id": "base",
            "object": "model",
            "created": 7,
            "owned_by": "octavo",
            "root": "base",
            "parent": None,
            "max_model_len": 2048,
            "vocab_size": 512,
        },
        {
            "id": "sql-lora",
            "object": "model",
            "created": 7,
            "owned_by": "octavo",
            "root": "sql-lora",
            "parent": "base",
            "max_model_len": 2048,
            "vocab_size": 512,
        },
    ]


def test_an_adapter_that_could_be_loaded_is_known_too():
    registry = registry_of(make_spec(0, names=("base",)))
    models = Models(registry, [ServedModelConfig(name="base", adapters=("fresh",))])
    assert models.resolve("fresh") == ModelRoute("pool", adapter="fresh")


def test_the_list_is_the_union_without_what_is_hidden():
    registry = registry_of(
        make_spec(0, pool="a", names=("one", "shared")),
        make_spec(1, pool="b", names=("two", "shared")),
    )
    config = [
        ServedModelConfig(name="alias", alias_of="one"),
        ServedModelConfig(name="two", hidden=True),
    ]
    models = Models(registry, config)
    assert [card.name for card in models.cards()] == ["alias", "one", "shared"]
    assert models.resolve("two") == ModelRoute("b")


def test_a_name_in_two_pools_goes_where_engines_are_ready():
    registry = registry_of(
        make_spec(0, pool="a", names=("m",)), make_spec(1, pool="b", names=("m",))
    )
    models = Models(registry)
    assert models.resolve("m").pool == "a"
    registry.report(registry.endpoints["pod-0"], "down")
    assert models.resolve("m").pool == "b"


def test_news_of_the_registry_is_seen_at_once():
    registry = registry_of(make_spec(0, names=("m",)))
    models = Models(registry)
    assert models.resolve("m").pool == "pool"
    registry.replace("test", [])
    with pytest.raises(Rejected):
        models.resolve("m")


def adapted_revisions():
    registry = two_revisions()
    for endpoint in registry.endpoints.values():
        registry.report(endpoint, "ready")
        endpoint.adapters = frozenset({"law"})
        registry.changed(endpoint)
    return registry


@pytest.mark.parametrize("weight", [0, 5, 100])
def test_an_adapters_requests_follow_the_weights_of_its_pools_model(weight):
    models = Models(adapted_revisions(), [canary(weight)])
    routes = [models.resolve("law", request_id=f"req-{i}") for i in range(10_000)]
    assert {route.adapter for route in routes} == {"law"}
    assert abs([r.revision for r in routes].count("r2") / 10_000 - weight / 100) <= 0.01
    if weight == 0:  # a revision that was rejected
        assert {route.revision for route in routes} == {"r1"}
    for session in ("alice", "bob", "carol"):
        found = {models.resolve("law", request_id=str(i), session=session) for i in range(20)}
        assert len(found) == 1


def test_weights_that_end_free_an_adapters_requests():
    models = Models(adapted_revisions(), [canary(5)])
    assert models.resolve("law", request_id="x").revision
    models.replace([ServedModelConfig(name="m", backends=(BackendConfig(pool="a"),))])
    assert models.resolve("law", request_id="x") == ModelRoute("a", adapter="law")
