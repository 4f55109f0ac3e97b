"""Engines that change sides: the decision from numbers alone, and what the registry makes of it.

Red when: a side is changed while every target is met, or again within seconds; more prompts go to a
side than it can compute; nobody is left that answers.
"""

from __future__ import annotations

import itertools
from random import Random

import pytest

from octavo_engine.protocol.stream import Load
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.endpoints.registry import Registry
from octavo_router.residency.underway import PyUnderway
from octavo_router.routing.policies import Policies
from octavo_router.routing.prefill_decode import PrefillDecode
from octavo_router.routing.side_keeper import SideKeeper
from octavo_router.routing.sides import (
    FULL,
    HOLD_S,
    EngineLoad,
    SideDemand,
    SideTargets,
    decide_sides,
    foreseen,
)

TIGHT = SideTargets(first_token_s=0.5, token_s=0.01)


def engines(computing: int, answering: int, *, running=15, step_s=0.011, queued=0):
    return [EngineLoad(f"p{i}", True, 0, queued, 4e-5, 0.0) for i in range(computing)] + [
        EngineLoad(f"d{i}", False, running, 0, 4e-5, step_s) for i in range(answering)
    ]


def decide(loads, tokens_per_s=24_000.0, targets=TIGHT, since_change_s=60.0):
    demand = SideDemand(tokens_per_s, 1200.0)
    return decide_sides(loads, demand, targets, since_change_s=since_change_s)


def test_prompts_leave_answers_that_they_make_late():
    change = decide(engines(0, 4))
    assert change is not None
    assert change.to_prompts == ("d0", "d1") and not change.to_answers
    assert change.reason.startswith("2 instead of 0 of 4 engines compute prompts: first token ")


def test_a_side_that_cannot_keep_up_is_enlarged():
    change = decide(engines(1, 3, queued=60_000), tokens_per_s=30_000.0)
    assert change is not None and len(change.to_prompts) == 1


def test_engines_come_back_when_prompts_are_few():
    loads = engines(2, 2, running=60, step_s=0.0099)
    change = decide(loads, tokens_per_s=1000.0)
    assert change is not None
    assert change.to_answers and not change.to_prompts


def test_where_the_first_token_is_what_counts_all_engines_compute():
    targets = SideTargets(first_token_s=0.06, token_s=1.0)
    change = decide(engines(1, 3), targets=targets)
    assert change is not None and change.to_answers == ("p0",)


def test_nothing_changes_while_the_targets_are_met():
    assert decide(engines(0, 4), targets=SideTargets(5.0, 0.5)) is None


def test_nothing_changes_again_within_seconds():
    assert decide(engines(0, 4), since_change_s=HOLD_S - 0.1) is None
    assert decide(engines(0, 4), since_change_s=HOLD_S) is not None


def test_a_change_is_not_taken_back_by_what_it_brings():
    """What is foreseen after a change, taken as measured, asks for no other one."""
    chance = Random(1)
    for _ in range(2000):
        count = chance.randint(2, 8)
        now = chance.randrange(count)
        loads = engines(
            now, count - now, running=chance.randint(1, 60), step_s=chance.uniform(0.005, 0.05)
        )
        demand = SideDemand(chance.uniform(0, 25_000 * count), chance.uniform(300, 8000))
        targets = SideTargets(chance.uniform(0.05, 5.0), chance.uniform(0.006, 0.1))
        change = decide_sides(loads, demand, targets, since_change_s=60.0)
        if change is None:
            continue
        k = now + len(change.to_prompts) - len(change.to_answers)
        assert 0 <= k < count
        before, after = foreseen(loads, demand)[now], foreseen(loads, demand)[k]
        assert after.over(targets) < before.over(targets)
        # No side is chosen that its prompts would fill, unless the one at hand is full as well.
        work = demand.tokens_per_s * 4e-5
        assert work / (k or count) <= FULL or work / (now or count) > FULL


def test_one_engine_answers_whatever_happens():
    change = decide(engines(2, 0), since_change_s=0.0)
    assert change is not None and change.to_answers == ("p0",)
    assert decide(engines(0, 1)) is None
    assert decide([]) is None


def pool(*roles, kv_role="kv_both"):
    registry = Registry()
    registry.replace(
        "test",
        [
            EndpointSpec(f"e{i}", Address("127.0.0.1", 8000 + i), role=role, names=("m",))
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
