"""Two replicas and one Lease: never two writers, whatever their clocks and networks do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from octavo_operator.cluster.leader import Leader, LeaseTimes
from octavo_operator.errors import ApiRefused, ClusterUnavailable
from octavo_operator.objects import kinds
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import Call, FakeCluster

TIMES = LeaseTimes(duration_s=15.0, renew_every_s=5.0, margin_s=3.0)


def make_leader(
    cluster: FakeCluster,
    identity: str,
    clock: ManualClock,
    *,
    deployment: str = "",
    times: LeaseTimes = TIMES,
) -> Leader:
    return Leader(
        cluster,
        namespace="ops",
        name="lease",
        identity=identity,
        clock=clock,
        now_text=lambda: f"t{clock.now}",
        times=times,
        deployment=deployment,
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


def test_what_is_under_way_has_to_end_before_another_may_begin():
    cluster, clock = FakeCluster(), ManualClock()
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", clock)
    attempt(one)
    attempt(two)
    clock.advance(11.9)  # the last moment in which a write may begin
    left_s = one.time_left_s()
    assert left_s == pytest.approx(3.1)
    clock.advance(left_s - 0.01)
    assert not attempt(two)


def test_a_renewal_counts_from_when_it_was_sent():
    cluster, clock = FakeCluster(), ManualClock()
    one = make_leader(cluster, "one", clock)

    def slow(call: Call) -> None:
        clock.advance(4.0)

    cluster.before = slow
    attempt(one)  # a read, and a write of four seconds
    clock.advance(7.9)
    assert one.is_leading()
    clock.advance(0.2)
    assert not one.is_leading()


@pytest.mark.parametrize("latency_s", [0.1, 2.0, 5.0])
def test_a_slow_api_server_costs_no_lead(latency_s, monkeypatch):
    """It could take nearly six seconds for each answer. Another never comes in between."""
    cluster, clock, led = FakeCluster(), ManualClock(), []
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", clock)

    def slow(call: Call) -> None:
        clock.advance(latency_s)
        led.append(one.is_leading())

    async def sleep(delay_s: float) -> None:
        clock.advance(delay_s)
        cluster.before = lambda call: None
        assert not await two.try_once()
        cluster.before = slow
        if len(led) > 40:
            raise asyncio.CancelledError

    cluster.before = slow
    monkeypatch.setattr("octavo_operator.cluster.leader.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(one.run(lambda: None))
    assert led[:2] == [False, False] and all(led[2:])


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_lease_that_somebody_changed_is_read_again_and_kept(change):
    cluster, clock = FakeCluster(), ManualClock()
    one = make_leader(cluster, "one", clock)
    assert attempt(one)
    clock.advance(5.0)
    if change == "edited":
        cluster.merge(kinds.LEASE, "ops", "lease", {"metadata": {"labels": {"a": "b"}}})
    else:
        cluster.remove(kinds.LEASE, "ops", "lease")
    assert attempt(one)
    clock.advance(11.9)
    assert one.is_leading()
    lease = cluster.one(kinds.LEASE, "ops", "lease")
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("one", 0)
    assert lease["metadata"].get("labels", {}) == ({"a": "b"} if change == "edited" else {})


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


def test_a_lead_that_ran_out_between_two_tries_begins_anew():
    """What was to be written meanwhile was refused, and waits for a new beginning."""
    cluster, clock = FakeCluster(), ManualClock()
    one = make_leader(cluster, "one", clock, times=replace(TIMES, renew_every_s=0.0))
    begun: list[float] = []

    async def story() -> None:
        running = asyncio.create_task(one.run(lambda: begun.append(clock.now)))
        for _ in range(100):
            await asyncio.sleep(0)
        clock.advance(12.0)  # the API server was away, and is back
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(story())
    assert one.is_leading()
    assert begun == [clock.now - 12.0, clock.now]


class TestOwner:
    """The Lease goes with the operator's Deployment: by the cluster's garbage collection."""

    def own(self, cluster: FakeCluster, name: str = "octavo-operator") -> str:
        body = {"apiVersion": "apps/v1", "kind": "Deployment",
                "metadata": {"namespace": "ops", "name": name}, "spec": {}}  # fmt: skip
        cluster.put(body)
        return kinds.uid_of(cluster.one(kinds.DEPLOYMENT, "ops", name))

    def leader(self, cluster: FakeCluster, clock: ManualClock, identity: str = "one") -> Leader:
        return make_leader(cluster, identity, clock, deployment="octavo-operator")

    def owners(self, cluster: FakeCluster) -> list[kinds.Object]:
        lease = cluster.one(kinds.LEASE, "ops", "lease")
        found: list[kinds.Object] = lease["metadata"].get("ownerReferences", [])
        return found

    def test_a_new_lease_belongs_to_it(self):
        cluster, clock = FakeCluster(), ManualClock()
        uid = self.own(cluster)
        assert attempt(self.leader(cluster, clock))
        # Without blockOwnerDeletion, for which some clusters want a right of its own.
        assert self.owners(cluster) == [
            {"apiVersion": "apps/v1", "kind": "Deployment", "name": "octavo-operator", "uid": uid}
        ]

    def test_a_lease_that_was_there_before_is_taken_along(self):
        cluster, clock = FakeCluster(), ManualClock()
        old = make_leader(cluster, "old", clock)
        attempt(old)
        asyncio.run(old.give_back())
        assert self.owners(cluster) == []
        uid = self.own(cluster)
        assert attempt(self.leader(cluster, clock))
        assert [owner["uid"] for owner in self.owners(cluster)] == [uid]

    def test_it_is_asked_for_once(self):
        cluster, clock = FakeCluster(), ManualClock()
        self.own(cluster)
        one = self.leader(cluster, clock)
        for _ in range(3):
            attempt(one)
        requested = [call for call in cluster.calls if call.kind == kinds.DEPLOYMENT]
        assert [call.verb for call in requested] == ["get"]

    @pytest.mark.parametrize("is_refused", [False, True])
    def test_without_it_or_the_right_to_read_it_the_lead_is_taken_all_the_same(self, is_refused):
        cluster, clock = FakeCluster(), ManualClock()

        def refuse(call: Call) -> None:
            if is_refused and call.kind == kinds.DEPLOYMENT:
                raise ApiRefused("deployments is forbidden", status=403)

        cluster.before = refuse
        assert attempt(self.leader(cluster, clock))
        assert self.owners(cluster) == []


def test_a_lease_that_vanished_is_not_taken_before_its_holder_must_have_noticed():
    cluster, clock = FakeCluster(), ManualClock()
    one, two = make_leader(cluster, "one", clock), make_leader(cluster, "two", clock)
    attempt(one)
    assert not attempt(two)
    cluster.remove(kinds.LEASE, "ops", "lease")
    clock.advance(4.0)
    assert one.is_leading()
    assert not attempt(two)
    assert attempt(one)  # who holds it makes it anew
    cluster.remove(kinds.LEASE, "ops", "lease")
    assert not attempt(two)
    clock.advance(15.0)
    assert not one.is_leading()
    assert attempt(two)


def test_a_lease_without_a_spec_is_free():
    cluster, clock = FakeCluster(), ManualClock()
    body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"namespace": "ops", "name": "lease"}}  # fmt: skip
    cluster.put(body)
    one = make_leader(cluster, "one", clock)
    assert attempt(one)
    asyncio.run(one.give_back())
    assert cluster.one(kinds.LEASE, "ops", "lease")["spec"]["holderIdentity"] == ""
