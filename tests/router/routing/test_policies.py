"""The other policies, one promise each, and profiles put together from parts."""

from collections import Counter
from random import Random

import pytest

from octavo_router.config.load import load_config
from octavo_router.config.settings import ProfileConfig, RouterConfig, RoutingConfig, WeightedConfig
from octavo_router.errors import ConfigInvalid
from octavo_router.residency.underway import PyUnderway
from octavo_router.routing.build import build_policies, build_policy, reconfigure
from octavo_router.routing.hashing import rank
from tests.fakes.endpoints import World, make_keys, make_request


def world_with(policy, num_endpoints=4, **routing):
    return World(
        num_endpoints, config=RouterConfig(routing=RoutingConfig(policy=policy, **routing))
    )


def picks(world, count, **fields):
    """Ids that `count` different prompts go to, one after the other."""
    found = []
    for number in range(count):
        lease = world.place(make_request((f"prompt {number}", 8), **fields))
        found.append(lease.endpoint.id)
        lease.finish()
    return found


def test_round_robin_goes_round():
    assert picks(world_with("round-robin"), 6) == [
        "pod-0",
        "pod-1",
        "pod-2",
        "pod-3",
        "pod-0",
        "pod-1",
    ]


def test_least_load_ignores_what_is_cached():
    world = world_with("least-load", 2)
    holder, other = world.endpoints
    world.hold(holder, make_keys(("system", 50)))
    world.tell(holder, queued_tokens=10)
    world.tell(other)
    assert world.place(make_request(("system", 50))).endpoint is other


def test_random_goes_everywhere():
    counts = Counter(picks(world_with("random"), 400))
    assert set(counts) == {"pod-0", "pod-1", "pod-2", "pod-3"}
    assert min(counts.values()) > 60


def test_power_of_two_never_takes_the_worst():
    world = world_with("power-of-two")
    world.tell(world.endpoints[2], queued_tokens=10_000)
    counts = Counter(picks(world, 200))
    assert "pod-2" not in counts
    assert len(counts) == 3


def test_power_of_two_needs_only_one():
    assert set(picks(world_with("power-of-two", 1), 5)) == {"pod-0"}


def test_consistent_hash_keeps_a_prefix_at_its_place():
    world = world_with("consistent-hash")
    first = world.place(make_request(("system", 8), ("one", 3)))
    second = world.place(make_request(("system", 8), ("two", 5)))
    assert first.endpoint is second.endpoint
    assert len(set(picks(world, 60))) == 4


def test_consistent_hash_moves_only_what_it_must():
    world = world_with("consistent-hash", 5)
    before = picks(world, 300)
    gone = world.endpoints[2]
    world.registry.report(gone, "down")
    after = picks(world, 300)
    for old, new in zip(before, after, strict=True):
        assert old == new or old == gone.id


def test_consistent_hash_bounds_the_load():
    world = world_with("consistent-hash", 4)
    for _ in range(100):
        world.place(make_request(("hot", 8)))
    assert max(endpoint.in_flight for endpoint in world.endpoints) <= 1.25 * 25 + 1


def test_ranks_are_the_same_in_every_process():
    assert rank(b"key", "pod-0") == 12990731391568960683


def test_a_session_stays():
    world = world_with("session")
    assert len(set(picks(world, 20, session="alice"))) == 1
    homes = {picks(world, 1, session=f"user {number}")[0] for number in range(40)}
    assert len(homes) == 4


def test_without_a_session_the_prefix_decides():
    world = world_with("session")
    world.hold(world.endpoints[3], make_keys(("system", 20)))
    lease = world.place(make_request(("system", 20)))
    assert lease.endpoint is world.endpoints[3]
    assert lease.decision.reason == "no session: lowest price"


def test_a_session_may_be_any_text():
    world = world_with("session")
    assert len(set(picks(world, 3, session="\ud800 ünïcode \x00"))) == 1


def with_adapters(world, *adapters):
    for endpoint, names in zip(world.endpoints, adapters, strict=True):
        endpoint.adapters = frozenset(names)
        world.registry.changed(endpoint)


def test_an_adapter_is_served_where_it_is_loaded_whatever_the_cache_says():
    world = world_with("prefix-load", 3)
    with_adapters(world, (), ("sql",), ())
    world.hold(world.endpoints[0], make_keys(("system", 50)))
    request = make_request(("system", 50), adapter="sql")
    assert world.place(request).endpoint.id == "pod-1"


def test_an_adapter_that_nobody_has_may_go_anywhere():
    world = world_with("prefix-load", 2)
    assert world.dispatcher.place(make_request(("p", 4), adapter="sql")) is not None


def test_lora_affinity_loads_a_second_copy_when_the_first_is_swamped():
    world = world_with("lora-affinity", 3)
    with_adapters(world, ("sql",), ("a", "b", "c"), ())
    request = make_request(("p", 4), adapter="sql")
    lease = world.place(request)
    assert (lease.endpoint.id, lease.decision.reason) == ("pod-0", "has the adapter")
    world.tell(world.endpoints[0], queued_tokens=50_000)
    lease = world.place(request)
    assert (lease.endpoint.id, lease.decision.reason) == ("pod-2", "will load the adapter soonest")


def test_a_subset_is_all_there_is():
    world = World(4)
    subset = ("10.0.0.2:8000", "10.0.0.4:8000", "10.9.9.9:1")
    assert set(picks(world, 20, subset=subset)) == {"pod-1", "pod-3"}
    assert world.dispatcher.place(make_request(("p", 4), subset=("10.9.9.9:1",))) is None


def test_fallbacks_are_the_next_best_in_order():
    world = World(4)
    for number, endpoint in enumerate(world.endpoints):
        world.tell(endpoint, queued_tokens=1000 * number)
    lease = world.place(make_request(("p", 4)), num_fallbacks=2)
    assert [e.id for e in (lease.endpoint, *lease.decision.fallbacks)] == [
        "pod-0",
        "pod-1",
        "pod-2",
    ]
    assert [e.in_flight for e in world.endpoints] == [1, 0, 0, 0]


def test_pools_may_have_policies_of_their_own():
    config = load_config(text="routing: {pools: [{name: a, policy: random}, {name: b}]}").routing
    policies = build_policies(config, PyUnderway(), Random(1))
    assert [policies.of(name).name for name in "abc"] == ["random", "prefix-load", "prefix-load"]
    assert policies.of("b") is not policies.of("c")


def test_an_unknown_policy_is_refused_before_anything_changes():
    world = World(2)
    before = world.dispatcher.policies
    with pytest.raises(ConfigInvalid, match="no policy 'nope'; there are prefix-load, least-load"):
        build_policy("nope", RoutingConfig(), PyUnderway(), Random(1))
    after = RouterConfig(routing=RoutingConfig(policy="random", shadows=("session",)))
    reconfigure(world.dispatcher, after, Random(1))
    assert world.dispatcher.policies is not before
    assert world.dispatcher.policies.default.name == "random"
    assert world.dispatcher.shadows is not None


# profiles


def profile(picker="max", filters=(), **weights):
    scorers = tuple(
        WeightedConfig(name=name.replace("_", "-"), weight=w) for name, w in weights.items()
    )
    parts = tuple(WeightedConfig(name=name, threshold=t) for name, t in filters)
    config = ProfileConfig(name="mine", filters=parts, scorers=scorers, picker=picker)
    return world_with("mine", profiles=(config,))


def test_weights_say_what_counts():
    for prefix, queue, winner in ((3.0, 1.0, "pod-0"), (1.0, 3.0, "pod-1")):
        world = profile(prefix=prefix, queue=queue)
        world.hold(world.endpoints[0], make_keys(("system", 10)))
        for number, endpoint in enumerate(world.endpoints):
            world.tell(endpoint, waiting=(9, 0, 5, 5)[number])
        assert world.place(make_request(("system", 10))).endpoint.id == winner


def test_equal_scores_take_turns():
    assert sorted(picks(profile(in_flight=1.0), 4)) == ["pod-0", "pod-1", "pod-2", "pod-3"]


def test_what_is_not_known_is_neither_good_nor_bad():
    world = profile(queue=1.0)
    world.tell(world.endpoints[0], waiting=0)
    world.tell(world.endpoints[1], waiting=8)
    scores = world.dispatcher.policies.default.explain(
        make_request(("p", 4)), world.endpoints, [0] * 4
    )
    assert [score["queue"] for score in scores] == [1.0, 0.0, 0.5, 0.5]


def test_a_filter_that_would_leave_nobody_is_skipped():
    world = profile(filters=[("prefix-at-least", 0.8)], wait=1.0)
    world.hold(world.endpoints[2], make_keys(("system", 10)))
    world.tell(world.endpoints[2], queued_tokens=9999)
    assert world.place(make_request(("system", 10))).endpoint.id == "pod-2"
    assert world.place(make_request(("else", 10))).endpoint.id != "pod-2"


@pytest.mark.parametrize(
    ("name", "threshold", "kept"),
    [("max-waiting", 4.0, {"pod-0"}), ("not-saturated", 0.0, {"pod-0", "pod-1", "pod-3"})],
)
def test_filters_by_load(name, threshold, kept):
    world = profile(picker="random", filters=[(name, threshold)])
    world.tell(world.endpoints[0], waiting=1)
    world.tell(world.endpoints[1], waiting=9)
    world.tell(world.endpoints[2], waiting=9, is_saturated=True)
    world.tell(world.endpoints[3], waiting=9)
    assert set(picks(world, 40)) == kept


def test_weighted_random_follows_the_scores():
    world = profile(picker="weighted-random", kv_usage=1.0)
    for endpoint, usage in zip(world.endpoints, (0.9, 0.1, 1.0, 1.0), strict=True):
        world.tell(endpoint, kv_usage=usage)
    counts = Counter(picks(world, 400))
    assert set(counts) == {"pod-0", "pod-1"}
    assert 0.05 < counts["pod-0"] / 400 < 0.16


def test_every_scorer_stays_between_0_and_1():
    world = profile(
        queue=1.0, running=1.0, in_flight=1.0, kv_usage=1.0, prefix=1.0, wait=1.0, adapter=1.0,
        session=1.0,
    )  # fmt: skip
    rng = Random(7)
    with_adapters(world, ("x",), ("x", "y"), (), ("z",))
    policy = world.dispatcher.policies.default
    for number in range(50):
        for endpoint in world.endpoints:
            endpoint.in_flight = rng.randrange(50)
            world.tell(
                endpoint, waiting=rng.randrange(9), running=rng.randrange(9), kv_usage=rng.random()
            )
        request = make_request(
            (f"{number}", 10), adapter=rng.choice(["", "x"]), session=rng.choice(["", "s"])
        )
        matched = [rng.randrange(200) for _ in world.endpoints]
        for score in policy.explain(request, world.endpoints, matched):
            assert score.pop("is_kept") == 1.0
            total = score.pop("total")
            assert all(0.0 <= value <= 1.0 for value in score.values())
            assert total == pytest.approx(sum(score.values()))
