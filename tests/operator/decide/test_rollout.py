"""The arithmetic of rollouts: exact steps first, then a machine that tries to break the promise."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo_operator.decide.rollout import (
    RevisionGroup,
    RevisionReplica,
    RolloutLimits,
    group_replicas,
    limits_of,
    next_step,
    recreate_step,
    victims,
)
from tests.fakes.effort import num_examples
from tests.fakes.replica_sets import resized


def serving(revision: str, count: int) -> RevisionGroup:
    return RevisionGroup(revision, target=count, routable=count, existing=count)


def walk(
    limits: RolloutLimits, shares: dict[str, int], groups: list[RevisionGroup]
) -> list[dict[str, int]]:
    """All targets on the way, where everything that is asked for serves at once."""
    steps = []
    for _ in range(100):
        step = next_step(limits, shares, groups)
        if not step.targets:
            break
        targets = {g.revision: g.target for g in groups} | step.targets
        steps.append({name: target for name, target in targets.items() if target})
        groups = [serving(name, target) for name, target in targets.items()]
    return steps


class TestSteps:
    def test_the_first_revision_comes_whole(self):
        assert walk(RolloutLimits(3), {"a": 3}, []) == [{"a": 3}]

    def test_one_extra_replica_at_a_time_and_never_fewer_than_asked_for(self):
        assert walk(RolloutLimits(3, max_surge=1), {"b": 3}, [serving("a", 3)]) == [
            {"a": 3, "b": 1},
            {"a": 2, "b": 1},
            {"a": 2, "b": 2},
            {"a": 1, "b": 2},
            {"a": 1, "b": 3},
            {"b": 3},
        ]

    def test_without_surge_one_goes_before_one_comes(self):
        limits = RolloutLimits(2, max_surge=0, max_unavailable=1)
        assert walk(limits, {"b": 2}, [serving("a", 2)]) == [
            {"a": 1},
            {"b": 1, "a": 1},
            {"b": 1},
            {"b": 2},
        ]

    def test_nothing_leaves_while_the_new_one_is_not_routable(self):
        groups = [serving("a", 2), RevisionGroup("b", target=1, routable=0, existing=1)]
        step = next_step(RolloutLimits(2), {"b": 2}, groups)
        assert step.targets == {}
        assert step.waiting_for == "2 of 2 replicas of revision b to become routable"
        assert not step.is_done

    def test_a_revert_takes_back_what_never_served_first(self):
        groups = [serving("a", 3), RevisionGroup("b", target=2, routable=1, existing=2)]
        assert next_step(RolloutLimits(4), {"a": 4}, groups).targets == {"b": 1}

    def test_three_edits_leave_the_overtaken_ones_before_the_one_that_serves(self):
        groups = [serving("a", 3), RevisionGroup("b", 1, 0, 1)]
        assert walk(RolloutLimits(3), {"c": 3}, groups)[0] == {"a": 3}
        assert walk(RolloutLimits(3), {"c": 3}, groups)[1] == {"a": 3, "c": 1}

    def test_a_broken_old_replica_makes_room_but_does_not_block(self):
        groups = [RevisionGroup("a", 4, 3, 4), serving("b", 1)]
        assert next_step(RolloutLimits(4), {"b": 4}, groups).targets == {"a": 3}

    def test_routers_that_forget_all_pods_do_not_empty_the_pool(self):
        groups = [RevisionGroup("a", 4, 0, 4), RevisionGroup("b", 1, 0, 1)]
        assert next_step(RolloutLimits(4), {"b": 4}, groups).targets == {}

    def test_fewer_are_asked_for(self):
        assert walk(RolloutLimits(1), {"a": 1}, [serving("a", 4)]) == [{"a": 1}]

    def test_none_are_asked_for(self):
        assert walk(RolloutLimits(0), {"a": 0}, [serving("a", 2), serving("b", 1)]) == [{}]

    def test_a_group_vanishes_when_its_last_replica_has_left(self):
        leaving = RevisionGroup("a", target=0, routable=0, existing=1)
        assert next_step(RolloutLimits(1), {"b": 1}, [leaving, serving("b", 1)]).vanished == ()
        gone = RevisionGroup("a", target=0)
        step = next_step(RolloutLimits(1), {"b": 1}, [gone, serving("b", 1)])
        assert step.vanished == ("a",)
        assert step.is_done

    def test_what_was_told_to_leave_is_not_capacity_any_more(self):
        groups = [RevisionGroup("a", target=1, routable=3, existing=3), serving("b", 2)]
        assert next_step(RolloutLimits(3), {"b": 3}, groups).targets == {"b": 3}


@pytest.mark.parametrize(
    ("surge", "unavailable", "expected"),
    [
        (1, 0, RolloutLimits(10, 1, 0)),
        ("25%", "25%", RolloutLimits(10, 3, 2)),
        ("0%", 0, RolloutLimits(10, 1, 0)),
        (0, 3, RolloutLimits(10, 0, 3)),
    ],
)
def test_shares_round_in_favour_of_capacity(surge, unavailable, expected):
    assert limits_of(10, surge, unavailable) == expected


def test_who_serves_nobody_leaves_first_then_the_least_busy():
    busy = RevisionReplica("busy", "a", ready=True, routable=True, in_flight=9)
    calm = RevisionReplica("calm", "a", ready=True, routable=True, in_flight=1)
    starting = RevisionReplica("starting", "a")
    leaving = RevisionReplica("leaving", "a", is_leaving=True)
    assert [r.id for r in victims([busy, calm, starting, leaving], 2)] == ["starting", "calm"]


def test_groups_count_only_those_that_stay():
    replicas = [
        RevisionReplica("1", "a", routable=True),
        RevisionReplica("2", "a", routable=True, is_leaving=True),
        RevisionReplica("3", "b"),
    ]
    assert group_replicas({"a": 1}, replicas) == [
        RevisionGroup("a", 1, 1, 2),
        RevisionGroup("b", 0, 0, 1),
    ]


class RolloutMachine(RuleBasedStateMachine):
    """Random edits, scalings and readiness, an operator killed between any two writes, and
    ReplicaSets that obey late."""

    @initialize(replicas=st.integers(0, 6), surge=st.integers(0, 3), unavailable=st.integers(0, 3))
    def begin(self, replicas: int, surge: int, unavailable: int) -> None:
        if surge == 0 and unavailable == 0:
            surge = 1
        self.surge, self.unavailable = surge, unavailable
        self.replicas = replicas
        self.revision = "r0"
        self.num_revisions = 1
        self.targets: dict[str, int] = {}
        self.pods: list[list[object]] = []  # revision, is routable

    @property
    def limits(self) -> RolloutLimits:
        return RolloutLimits(self.replicas, self.surge, self.unavailable)

    def groups(self) -> list[RevisionGroup]:
        replicas = [
            RevisionReplica(str(i), str(revision), ready=bool(ok), routable=bool(ok))
            for i, (revision, ok) in enumerate(self.pods)
        ]
        return group_replicas(self.targets, replicas)

    def num_serving(self) -> int:
        return sum(group.serving for group in self.groups())

    @rule(writes=st.integers(0, 4))
    def operate(self, writes: int) -> None:
        """One reconcile, killed after so many writes."""
        before = self.num_serving()
        step = next_step(self.limits, {self.revision: self.replicas}, self.groups())
        for number, (revision, target) in enumerate(step.targets.items()):
            if number >= writes:
                return
            total = sum(self.targets.values())
            grows = target > self.targets.get(revision, 0)
            self.targets[revision] = target
            if grows:
                assert sum(self.targets.values()) <= max(self.limits.most, total)
            assert self.num_serving() >= min(before, self.limits.least_serving)
        if writes > len(step.targets):
            for revision in step.vanished:
                assert not any(pod[0] == revision for pod in self.pods)
                del self.targets[revision]

    @rule()
    def replica_sets_obey(self) -> None:
        self.pods = resized(self.pods, self.targets)

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def pod_becomes_routable(self, data: st.DataObject) -> None:
        self.pods[data.draw(st.integers(0, len(self.pods) - 1))][1] = True

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def pod_fails(self, data: st.DataObject) -> None:
        self.pods[data.draw(st.integers(0, len(self.pods) - 1))][1] = False

    @rule()
    def edit(self) -> None:
        self.revision = f"r{self.num_revisions}"
        self.num_revisions += 1

    @rule(data=st.data())
    def revert(self, data: st.DataObject) -> None:
        self.revision = f"r{data.draw(st.integers(0, self.num_revisions - 1))}"

    @rule(replicas=st.integers(0, 6))
    def scale(self, replicas: int) -> None:
        self.replicas = replicas

    def teardown(self) -> None:
        """From any state, left alone, the rollout finishes with nothing left over."""
        if not hasattr(self, "targets"):
            return
        for _ in range(80):
            step = next_step(self.limits, {self.revision: self.replicas}, self.groups())
            if step.is_done and not step.vanished:
                break
            self.targets |= step.targets
            for revision in step.vanished:
                del self.targets[revision]
            self.replica_sets_obey()
            self.pods = [[revision, True] for revision, _ in self.pods]
        self.replica_sets_obey()
        wanted = {self.revision: self.replicas} if self.replicas else {}
        assert {name: count for name, count in self.targets.items() if count} == wanted
        assert len(self.pods) == self.replicas


RolloutMachine.TestCase.settings = settings(
    max_examples=num_examples(200, 80), stateful_step_count=25, deadline=None, derandomize=True
)
TestRolloutMachine = RolloutMachine.TestCase


class TestRecreate:
    def test_everybody_leaves_before_anybody_comes(self):
        limits = RolloutLimits(2)
        assert recreate_step(limits, "b", [serving("a", 2)]).targets == {"a": 0}

        leaving = RevisionGroup("a", target=0, routable=0, existing=1)
        step = recreate_step(limits, "b", [leaving])
        assert step.targets == {}
        assert not step.is_done
        assert step.waiting_for == "replicas of revision a to leave"

        gone = RevisionGroup("a", target=0, routable=0, existing=0)
        assert recreate_step(limits, "b", [gone]).targets == {"b": 2}

    def test_the_first_revision_and_a_change_of_number_wait_for_nobody(self):
        assert recreate_step(RolloutLimits(2), "a", []).targets == {"a": 2}
        assert recreate_step(RolloutLimits(3), "a", [serving("a", 2)]).targets == {"a": 3}
        assert recreate_step(RolloutLimits(2), "a", [serving("a", 2)]).is_done
