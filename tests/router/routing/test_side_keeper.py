"""Engines that change sides in a router: what its registry makes of the decision.

Red when: an engine is placed by another side than the one chosen; one that cannot or need not
change does; one that the operator moves is moved by a router as well.
"""

from __future__ import annotations

import itertools

import pytest

from octavo_engine.protocol.sides import SideTargets
from octavo_engine.protocol.stream import Load
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.residency.underway import PyUnderway
from octavo_router.routing.policies import Policies
from octavo_router.routing.prefill_decode import PrefillDecode
from octavo_router.routing.side_keeper import SideKeeper

TIGHT = SideTargets(first_token_s=0.5, token_s=0.01)


def pool(*roles, kv_role="kv_both", is_moved=False):
    registry = Registry()
    registry.replace(
        "test",
        [
            EndpointSpec(
                f"e{i}", Address("127.0.0.1", 8000 + i), role=role, names=("m",), is_moved=is_moved
            )
            for i, role in enumerate(roles)
        ],
    )
    for endpoint in registry.endpoints.values():
        endpoint.kind, endpoint.kv_role = "octavo", kv_role
        registry.report(endpoint, "ready")
    return registry


def keep(registry, *, targets=TIGHT, seconds=12, start=0):
    """Ticks, while each engine computes as many prompts as make answers late."""
    policy = PrefillDecode(
        PyUnderway(), min_tokens=256, balance_factor=1.25, balance_slack=8, targets=targets
    )
    assert policy.is_worth_it(1200)
    keeper = SideKeeper(registry)
    policies = Policies(policy)
    for second in range(start, start + seconds):
        for endpoint in registry.endpoints.values():
            endpoint.token_s = 4e-5
            endpoint.load = Load(running=15, step_s=0.011, computed_tokens=6000 * second)
        keeper.tick(policies, float(second))
    return keeper


def sides(registry):
    return (
        {endpoint.id for endpoint in registry.candidates("default").endpoints},
        {endpoint.id for endpoint in registry.prefillers("default").endpoints},
    )


def test_the_registry_places_by_the_side_that_was_chosen():
    registry = pool("both", "both", "both", "both")
    keeper = keep(registry)
    answering, computing = sides(registry)
    assert len(answering) == len(computing) == 2
    assert not answering & computing
    assert keeper.num_changes == {("default", "prefill"): 2}
    assert "instead of 0 of 4" in keeper.reasons["default"]


@pytest.mark.parametrize(
    ("targets", "kv_role"), [(None, "kv_both"), (TIGHT, "kv_consumer"), (TIGHT, "")]
)
def test_who_cannot_or_need_not_change_stays(targets, kv_role):
    registry = pool("both", "both", "both", "both", kv_role=kv_role)
    assert not keep(registry, targets=targets).num_changes
    assert sides(registry) == ({"e0", "e1", "e2", "e3"}, set())


def test_without_targets_each_is_where_its_spec_says():
    registry = pool("both", "both", "both", "both")
    keep(registry)
    keep(registry, targets=None)
    assert sides(registry) == ({"e0", "e1", "e2", "e3"}, set())


def test_an_engine_answers_again_where_those_that_answered_are_gone():
    registry = pool("both", "both", "both", "both")
    keep(registry)
    answering, computing = sides(registry)
    for id_ in answering:
        registry.report(registry.endpoints[id_], "down")
    assert sides(registry)[0] == computing  # at once, before anything is decided
    keep(registry, seconds=1)
    assert len(sides(registry)[0]) >= 1 and not sides(registry)[0] & sides(registry)[1]


def test_revisions_are_decided_apart():
    registry = Registry()
    registry.replace(
        "test",
        [
            EndpointSpec(f"{r}{i}", Address("127.0.0.1", n), names=("m",), revision=r)
            for n, (r, i) in enumerate(itertools.product("ab", range(4)), start=8000)
        ],
    )
    for endpoint in registry.endpoints.values():
        endpoint.kind, endpoint.kv_role = "octavo", "kv_both"
        registry.report(endpoint, "ready")
    keep(registry)
    for revision in "ab":
        assert len(registry.prefillers("default", revision).endpoints) == 2


def test_engines_that_the_operator_moves_are_not_moved_by_a_router():
    registry = pool("prefill", "both", "both", "both", is_moved=True)
    assert not keep(registry).num_changes
    assert sides(registry) == ({"e1", "e2", "e3"}, {"e0"})


@pytest.mark.parametrize("is_moved", [True, False])
def test_of_engines_that_compute_prompts_those_that_are_moved_answer_where_no_other_does(is_moved):
    registry = pool("prefill", "both", is_moved=is_moved)
    registry.report(registry.endpoints["e1"], "down")
    assert sides(registry)[0] == ({"e0"} if is_moved else set())
