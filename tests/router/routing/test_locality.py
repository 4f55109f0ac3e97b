"""Zones: of equal engines the near one is taken, and no more than that."""

from __future__ import annotations

import collections
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from octavo_router.config.settings import (
    DiscoveryConfig,
    ProfileConfig,
    RouterConfig,
    RoutingConfig,
    WeightedConfig,
)
from octavo_router.routing import pricing
from octavo_router.routing.build import reconfigure
from tests.fakes.endpoints import World, make_request


def zoned(own: str, zones: str, **routing: Any) -> World:
    """One engine a letter, in the zone of that name; "-": not known."""
    config = RouterConfig(discovery=DiscoveryConfig(zone=own), routing=RoutingConfig(**routing))
    world = World(0, config=config)
    for zone in zones:
        world.add(1, zone=zone.strip("-"))
    return world


def picks(world: World, count: int = 12) -> collections.Counter[str]:
    """The zones of requests that come one after the other."""
    found: collections.Counter[str] = collections.Counter()
    for number in range(count):
        lease = world.place(make_request((f"prompt {number}", 4)))
        found[lease.endpoint.spec.zone] += 1
        lease.finish()
    return found


def test_of_idle_engines_those_of_the_own_zone_are_taken():
    assert picks(zoned("b", "aabb")) == {"b": 12}


@pytest.mark.parametrize(("own", "zones"), [("", "aabb"), ("b", "----"), ("c", "aabb")])
def test_without_a_near_one_nothing_is_different(own: str, zones: str):
    world = zoned(own, zones)
    counts = collections.Counter[str]()
    for number in range(12):
        lease = world.place(make_request((f"prompt {number}", 4)))
        counts[lease.endpoint.id] += 1
        lease.finish()
    assert set(counts.values()) == {3}


def test_one_whose_zone_is_not_known_is_not_held_back():
    assert set(picks(zoned("a", "a-"))) == {"a", ""}


def test_a_queue_weighs_more_than_the_way():
    world = zoned("a", "ab")
    leases = [world.place(make_request((f"prompt {number}", 64))) for number in range(8)]
    zones = collections.Counter(lease.endpoint.spec.zone for lease in leases)
    assert zones == {"a": 4, "b": 4}


def test_a_prefix_elsewhere_weighs_more_than_the_way():
    world = zoned("a", "ab")
    request = make_request(("a long prompt", 64))
    world.hold(world.endpoints[1], request.keys)
    assert world.place(request).endpoint.spec.zone == "b"


def test_the_price_says_what_the_way_costs():
    world = zoned("a", "ab", zone_cost_s=0.25)
    near, far = world.endpoints
    assert pricing.seconds(far, 100) - pricing.seconds(near, 100) == pytest.approx(0.25)
    assert pricing.wait_s(far, 100) == pricing.wait_s(near, 100)  # the engine's alone
    policy = world.dispatcher.policies.default
    scores = policy.explain(make_request(("x", 2)), [near, far], [0, 0])
    assert [score["zone_s"] for score in scores] == [0.0, 0.25]


def test_a_hot_prefix_is_copied_within_the_zone_first():
    """The second look, at what many share, counts the way too."""
    world = zoned("a", "aab")
    request = make_request(("what all ask", 32))
    world.hold(world.endpoints[0], request.keys)
    zones = {world.place(make_request(("what all ask", 32))).endpoint.spec.zone for _ in range(6)}
    assert zones == {"a"}


def test_an_engine_that_turns_out_to_be_near_is():
    world = zoned("b", "a-")
    specs = [endpoint.spec for endpoint in world.endpoints]
    world.registry.replace("test", [specs[0], replace(specs[1], zone="b")])
    assert picks(world) == {"b": 12}


def test_the_cost_can_be_changed_while_it_runs():
    world = zoned("b", "ab")
    config = replace(world.config, routing=replace(world.config.routing, zone_cost_s=0.0))
    reconfigure(world.dispatcher, config, Random(1))
    assert picks(world) == {"a": 6, "b": 6}
    (late,) = world.add(1, zone="a")
    assert late.zone_s == 0.0


def test_profiles_have_a_score_for_it():
    profile = ProfileConfig(name="near", scorers=(WeightedConfig(name="zone"),))
    world = zoned("b", "ab-", policy="near", profiles=(profile,))
    assert picks(world) == {"b": 12}
    policy = world.dispatcher.policies.default
    scores = policy.explain(make_request(("x", 2)), world.endpoints, [0, 0, 0])
    assert [score["zone"] for score in scores] == [0.0, 1.0, 0.5]
