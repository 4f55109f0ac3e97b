"""Two replicas and one Lease: never two writers, whatever their clocks and networks do."""

from __future__ import annotations

import asyncio

import pytest

from octavo_operator import kinds
from octavo_operator.errors import ClusterUnavailable
from octavo_operator.leader import Leader, LeaseTimes
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import Call, FakeCluster

TIMES = LeaseTimes(duration_s=15.0, renew_every_s=5.0, margin_s=3.0)


def make_leader(cluster: FakeCluster, identity: str, clock: ManualClock) -> Leader:
    return Leader(
        cluster,
        namespace="ops",
        name="lease",
        identity=identity,
        clock=clock,
        now_text=lambda: f"t{clock.now}",
        times=TIMES,
    )


def attempt(leader: Leader) -> bool:
    return asyncio.run(leader.try_once())


def test_the_first_one_leads_and_the_second_waits():
    cluster, clock = FakeCluster(), ManualClock()
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", clock)
    assert attempt(one)
    assert not attempt(two)
    lease = cluster.one(kinds.LEASE, "ops", "lease")
    assert lease["spec"]["holderIdentity"] == "one"


def test_the_fence_falls_before_anybody_else_may_begin():
    cluster, clock = FakeCluster(), ManualClock()
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", clock)
    attempt(one)
    attempt(two)
    clock.advance(11.9)
    assert one.is_leading()
    clock.advance(0.1)
    assert not one.is_leading()
    assert not attempt(two)
    clock.advance(3.0)
    assert attempt(two)
    assert cluster.one(kinds.LEASE, "ops", "lease")["spec"]["leaseTransitions"] == 1
    assert not attempt(one)


def test_a_renewal_counts_from_when_it_was_sent():
    cluster, clock = FakeCluster(), ManualClock()
    one = make_leader(cluster, "one", clock)

    def slow(call: Call) -> None:
        clock.advance(4.0)

    cluster.before = slow
    attempt(one)  # a read and a write: eight seconds
    clock.advance(3.9)
    assert one.is_leading()
    clock.advance(0.2)
    assert not one.is_leading()


def test_renewals_that_are_seen_keep_the_second_waiting_whatever_the_clocks_say():
    cluster, clock, far = FakeCluster(), ManualClock(), ManualClock(9e9)
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", far)
    for _ in range(10):
        assert attempt(one)
        assert not attempt(two)
        clock.advance(5.0)
        far.advance(14.0)


def test_of_two_that_take_an_expired_lease_at_once_one_wins():
    cluster, clock = FakeCluster(), ManualClock()
    attempt(make_leader(cluster, "gone", clock))
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", clock)
    attempt(one)
    attempt(two)
    clock.advance(15.0)
    won: list[str] = []

    def overtake(call: Call) -> None:
        if call.verb == "replace" and not won:
            cluster.before = lambda call: None
            won.append("two")
            lease = cluster.one(kinds.LEASE, "ops", "lease")
            lease["spec"]["holderIdentity"] = "two"
            cluster.put(lease)

    cluster.before = overtake
    assert not attempt(one)
    assert not one.is_leading()
    assert attempt(two)


def test_giving_it_back_lets_the_next_one_begin_at_once():
    cluster, clock = FakeCluster(), ManualClock()
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", clock)
    attempt(one)
    asyncio.run(one.give_back())
    assert not one.is_leading()
    assert attempt(two)
    asyncio.run(one.give_back())  # no longer its own
    assert cluster.one(kinds.LEASE, "ops", "lease")["spec"]["holderIdentity"] == "two"


def test_an_api_server_that_is_away_ends_the_lead_in_time_and_not_before():
    cluster, clock = FakeCluster(), ManualClock()
    one = make_leader(cluster, "one", clock)
    attempt(one)

    def fail(call: Call) -> None:
        raise ClusterUnavailable("away")

    cluster.before = fail
    clock.advance(5.0)
    with pytest.raises(ClusterUnavailable):
        attempt(one)
    assert one.is_leading()
    clock.advance(7.0)
    assert not one.is_leading()
