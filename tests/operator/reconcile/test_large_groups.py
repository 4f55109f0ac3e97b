"""Groups of 64 pods over an API server in memory: what rolls, scales and breaks does so as groups.

As on a real cluster, a pod that serves is ready while all its workers run, and at no other time.
"""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.protocol.kubernetes import COMPONENT_LABEL, REVISION_LABEL
from octavo_operator.decide.observed import condition_of
from octavo_operator.objects import kinds, labels
from tests.fakes.operator import OperatorBench, make_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_operator.objects.kinds import Object

pytestmark = pytest.mark.slow
SIZE = 64
GROUP = {"size": SIZE, "secretRef": {"name": "between"}}


class Groups:
    """Moves everything by one step at a time, and counts what is whole."""

    def __init__(self, size: int = SIZE, **spec: Any) -> None:
        self.bench = OperatorBench()
        self.size = size
        self.all_ranks = {str(rank) for rank in range(1, size)}
        self.bench.create(group={**GROUP, "size": size}, engine={"device": "cpu"}, **spec)

    def step(self) -> None:
        self.bench.clock.advance(1.0)
        self.bench.reconcile()
        self.bench.workloads.sync()
        self.run()

    def run(self) -> None:
        """As kubelets and engines do."""
        pods = self.bench.pods()
        ranks: dict[str, set[str]] = {}
        for pod in pods:
            if not self.is_leader(pod):
                own = kinds.labels_of(pod)
                ranks.setdefault(own[labels.LEADER_LABEL], set()).add(own[labels.RANK_LABEL])
        for pod in pods:
            is_ready = not self.is_leader(pod) or ranks.get(kinds.uid_of(pod)) == self.all_ranks
            if condition_of(pod, "ContainersReady") != f"{is_ready}":
                self.bench.workloads.set_condition(pod, "ContainersReady", f"{is_ready}")
            if condition_of(pod, "Ready") != "True" or not is_ready:
                self.bench.workloads.update_ready(pod)

    def until(
        self, is_over: Callable[[], bool], *, least: int = 0, most_steps: int = 60
    ) -> list[int]:
        """The number of groups that serve, by step; at least `least` at each."""
        seen = []
        for _ in range(most_steps):
            self.step()
            seen.append(len(self.serving()))
            assert seen[-1] >= least, seen
            if is_over():
                return seen
        raise AssertionError(f"not over after {most_steps} steps: {seen}")

    @staticmethod
    def is_leader(pod: Object) -> bool:
        return kinds.labels_of(pod)[COMPONENT_LABEL] == "engine"

    def leaders(self) -> list[Object]:
        return [pod for pod in self.bench.pods() if self.is_leader(pod)]

    def workers(self, leader: Object) -> list[Object]:
        uid = kinds.uid_of(leader)
        return [
            pod
            for pod in self.bench.pods()
            if not self.is_leader(pod) and kinds.labels_of(pod)[labels.LEADER_LABEL] == uid
        ]

    def serving(self) -> list[Object]:
        return [pod for pod in self.leaders() if condition_of(pod, "Ready") == "True"]

    def revisions(self) -> list[str]:
        return sorted(kinds.labels_of(pod)[REVISION_LABEL] for pod in self.serving())

    def is_settled(self, replicas: int) -> bool:
        """That many groups are all there is, and all are whole."""
        leaders = self.leaders()
        pods = len(self.bench.pods())
        return len(leaders) == len(self.serving()) == replicas and pods == replicas * self.size


def test_a_rollout_replaces_whole_groups_and_never_has_fewer():
    groups = Groups(replicas=2)
    groups.until(lambda: groups.is_settled(2))
    before = groups.revisions()
    groups.bench.edit(engine={"device": "cpu", "maxNumSeqs": 8})
    groups.until(
        lambda: groups.is_settled(2) and not set(before) & set(groups.revisions()), least=2
    )
    groups.step()
    assert groups.bench.conditions()["Progressing"][1] == "Complete"
    assert groups.bench.calls_at_rest() == []


def test_a_canary_gets_requests_once_its_group_is_whole():
    rollout = {"strategy": "Canary", "canary": {"steps": [{"weight": 50, "pause": "1h"}]}}
    groups = Groups(replicas=2, rollout=rollout)
    groups.until(lambda: groups.is_settled(2))
    groups.bench.edit(engine={"device": "cpu", "maxNumSeqs": 8})

    def weights() -> dict[str, int]:
        service = groups.bench.cluster.one(kinds.SERVICE, "default", "smollm2")
        text = service["metadata"]["annotations"]["octavo.dev/routing"]
        return dict(json.loads(text).get("weights", {}))

    def canary_weight() -> int:
        new = set(weights()) - set(old)
        return sum(weights()[name] for name in new)

    old = groups.revisions()
    groups.until(lambda: canary_weight() > 0, least=2)
    assert (canary_weight(), len(set(groups.revisions()))) == (50, 2)
    # A worker of the canary is lost: its group serves nothing, and the stable one serves all.
    (trial,) = (pod for pod in groups.serving() if kinds.labels_of(pod)[REVISION_LABEL] not in old)
    groups.bench.workloads.kill(groups.workers(trial)[SIZE // 2])
    groups.run()
    assert set(groups.revisions()) <= set(old)
    groups.bench.reconcile()
    assert canary_weight() == 0


def test_groups_are_scaled_as_wholes_and_the_least_busy_one_leaves():
    groups = Groups(replicas=1)
    groups.until(lambda: groups.is_settled(1))
    groups.bench.edit(replicas=3)
    groups.until(lambda: groups.is_settled(3), least=1)
    uids = [kinds.uid_of(pod) for pod in groups.leaders()]
    busy = dict(zip(uids, (5, 0, 7), strict=True))
    groups.bench.demand.expect(["router-0"])
    groups.bench.demand.learn("router-0", make_state(ready=tuple(uids), busy=busy))
    groups.bench.edit(replicas=2)
    groups.until(lambda: groups.is_settled(2), least=2)
    assert {kinds.uid_of(pod) for pod in groups.leaders()} == {uids[0], uids[2]}


def test_a_lost_rank_costs_its_group_alone_and_is_replaced_without_the_operator():
    groups = Groups(replicas=2)
    groups.until(lambda: groups.is_settled(2))
    first, second = groups.leaders()
    lost = groups.workers(first)[36]
    groups.bench.workloads.kill(lost)
    groups.run()
    assert [kinds.uid_of(pod) for pod in groups.serving()] == [kinds.uid_of(second)]
    groups.bench.reconcile()
    status = groups.bench.deployment()["status"]
    assert (status["replicas"], status["routableReplicas"]) == (2, 1)
    groups.bench.workloads.sync()
    groups.run()
    # Routers send it requests from here on; the gate is what rollouts wait for.
    assert all(condition_of(pod, "ContainersReady") == "True" for pod in groups.leaders())
    groups.until(lambda: groups.is_settled(2), least=1, most_steps=3)
    assert {kinds.uid_of(pod) for pod in groups.leaders()} == {
        kinds.uid_of(first), kinds.uid_of(second),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_to_groups_they_become_whole_again(seed: int):
    """Small ones, so that much happens to them."""
    rng, size = Random(seed), 5
    groups = Groups(size, replicas=3)
    groups.until(lambda: groups.is_settled(3))
    replicas = 3
    for number in range(25):
        match rng.randrange(6):
            case 0:
                replicas = rng.randint(1, 4)
                groups.bench.edit(replicas=replicas)
            case 1:
                groups.bench.edit(engine={"device": "cpu", "maxNumSeqs": 8 + number})
            case 2:
                if leaders := groups.leaders():
                    groups.bench.workloads.kill(rng.choice(leaders))
            case _:
                if pods := [pod for pod in groups.bench.pods() if not groups.is_leader(pod)]:
                    groups.bench.workloads.kill(rng.choice(pods))
        for _ in range(rng.randint(0, 3)):
            groups.step()
        # Nobody computes for a pod that is gone, and no rank is there twice.
        owners = {kinds.uid_of(pod) for pod in groups.leaders()}
        places = [
            (kinds.labels_of(pod)[labels.LEADER_LABEL], kinds.labels_of(pod)[labels.RANK_LABEL])
            for pod in groups.bench.pods()
            if not groups.is_leader(pod)
        ]
        assert {uid for uid, _ in places} <= owners
        assert len(places) == len(set(places))
    groups.until(lambda: groups.is_settled(replicas), most_steps=80)
    groups.until(lambda: groups.bench.conditions()["Progressing"][1] == "Complete")
    assert groups.bench.calls_at_rest() == []
