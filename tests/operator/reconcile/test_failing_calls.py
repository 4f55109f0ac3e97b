"""Calls that fail, pods that do not come up, and an operator killed at any of its writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.errors import ApiRefused, ClusterUnavailable, Conflict
from octavo_operator.objects import kinds
from tests.fakes.effort import sample
from tests.fakes.operator import KEY, OperatorBench, make_deployment, running_operator

if TYPE_CHECKING:
    from tests.fakes.cluster import Call, FakeCluster

UNSETTLED = {"engine": {"maxNumSeqs": 7}}


_ERRORS = [
    ClusterUnavailable("overloaded", status=429, retry_after_s=7.0),
    ClusterUnavailable("down"),
    Conflict("changed", status=409),
    ApiRefused("no", status=422),
]


class Killed(BaseException):
    """SIGKILL, as far as Python can have one."""


class TestFailingCalls:
    @pytest.mark.parametrize("error", _ERRORS, ids=repr)
    def test_any_error_at_any_call_is_survived(self, error):
        reference = running_operator()
        every = range(1, len(reference.cluster.calls))
        for number in sample(every, every[_ERRORS.index(error) :: 2]):
            bench = OperatorBench()
            bench.create(replicas=2)
            bench.cluster.before = fail_once(number, error)
            bench.settle(rounds=60)
            assert snapshot(bench.cluster) == snapshot(reference.cluster), number

    def test_retry_after_reaches_the_queue(self):
        bench = OperatorBench()
        bench.create()
        bench.cluster.before = fail_once(
            1, ClusterUnavailable("overloaded", status=429, retry_after_s=7.0)
        )
        outcome = bench.reconcile()
        assert outcome.is_failed
        assert outcome.again_after_s == 7.0

    def test_a_refused_child_is_named_and_starts_no_engine(self):
        bench = OperatorBench()
        bench.create()

        def refuse(call: Call) -> None:
            if (call.verb, call.kind) == ("apply", kinds.CONFIG_MAP):
                raise ApiRefused("exceeded quota: q, requested: configmaps=1", status=403)

        bench.cluster.before = refuse
        assert bench.reconcile().is_failed
        status, reason, message = bench.conditions()["Ready"]
        assert (status, reason) == ("False", "QuotaExceeded")
        assert message.startswith("ConfigMap smollm2-")
        assert message.endswith("Raise the quota, or lower replicas or resources.")
        assert bench.cluster.all(kinds.DEPLOYMENT) == []
        assert bench.cluster.has(kinds.SERVICE, "default", "smollm2")

    def test_events_that_cannot_be_posted_stop_nothing(self):
        bench = OperatorBench()
        bench.create(replicas=2)

        def refuse(call: Call) -> None:
            if call.kind == kinds.EVENT:
                raise ApiRefused("forbidden", status=403)

        bench.cluster.before = refuse
        bench.settle()
        assert bench.conditions()["Ready"][0] == "True"

    def test_without_the_lease_nothing_is_written(self):
        bench = OperatorBench()
        bench.create()
        bench.is_leading = False
        bench.reconcile()
        assert bench.cluster.writes == []

    def test_a_pod_that_does_not_come_up_is_explained_within_one_look(self):
        bench = OperatorBench()
        bench.create(replicas=1)
        bench.reconcile()
        bench.workloads.sync()
        (pod,) = bench.pods()
        message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        condition = {"type": "PodScheduled", "status": "False", "message": message}
        bench.workloads.set_status(pod, {"conditions": [condition]})
        bench.reconcile()
        status, reason, text = bench.conditions()["Ready"]
        assert (status, reason) == ("False", "InsufficientGPU")
        assert "3 Insufficient nvidia.com/gpu. Add a node with GPUs" in text
        events = [e for e in bench.cluster.all(kinds.EVENT) if e["type"] == "Warning"]
        assert [e["reason"] for e in events] == ["InsufficientGPU"]
        bench.reconcile()
        assert len([e for e in bench.cluster.all(kinds.EVENT) if e["type"] == "Warning"]) == 1

    def test_a_failing_mount_is_found_in_events(self):
        bench = OperatorBench()
        bench.create(replicas=1)
        bench.reconcile()
        bench.workloads.sync()
        (pod,) = bench.pods()
        bench.workloads.set_condition(pod, "PodScheduled", "True")
        bench.cluster.put(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"namespace": "default", "name": "x"},
                "involvedObject": {"uid": kinds.uid_of(pod), "kind": "Pod"},
                "type": "Warning",
                "reason": "FailedMount",
                "message": 'MountVolume.SetUp failed: secret "hub-token" not found',
            }
        )
        bench.reconcile()
        assert bench.conditions()["Ready"][:2] == ("False", "SecretMissing")


class TestKilled:
    """O01-O07: before and after each write; it ends as an undisturbed run does."""

    @pytest.mark.slow
    @pytest.mark.parametrize("story", ["create", "edit", "scale up", "scale down", "revert"])
    def test_at_every_write(self, story):
        reference, _ = play(story, None)
        total = len(reference.cluster.writes)
        assert total > 3
        for number in range(1, total + 1):
            for is_after in sample((False, True), (bool(number % 2),)):
                bench, least = play(story, (number, is_after))
                assert snapshot(bench.cluster) == snapshot(reference.cluster), (number, is_after)
                if story in ("edit", "revert", "scale up"):
                    assert least >= 2, (number, is_after)


def play(story: str, kill: tuple[int, bool] | None) -> tuple[OperatorBench, int]:
    """A story with an operator that is killed once; with the fewest replicas that ever served."""
    if story == "create":
        bench = OperatorBench()
        bench.create(replicas=2)
    else:
        bench = running_operator(replicas=3 if story == "scale down" else 2)
    bench.cluster.calls.clear()
    if story in ("edit", "revert"):
        bench.edit(**UNSETTLED)
    if story == "scale up":
        bench.edit(replicas=4)
    if story == "scale down":
        bench.edit(replicas=1)
    if kill is not None:
        number, is_after = kill

        def strike(call: Call) -> None:
            if len(bench.cluster.writes) == number and call.is_write:
                bench.cluster.before = bench.cluster.after = lambda call: None
                raise Killed

        if is_after:
            bench.cluster.after = strike
        else:
            bench.cluster.before = strike
    least, is_reverted = 99, False
    for _ in range(80):
        before = len(bench.cluster.events)
        was_killed = False
        try:
            bench.reconcile()
        except Killed:
            was_killed = True
            bench = OperatorBench(bench.cluster, clock=bench.clock)
        if story == "revert" and not is_reverted and len(bench.engines()) == 2:
            is_reverted = True
            bench.edit(engine={"maxNumSeqs": None})
        bench.workloads.sync()
        bench.workloads.make_all_ready()
        least = min(least, bench.num_ready())
        if len(bench.cluster.events) == before and not was_killed:
            return bench, least
    raise AssertionError("not settled")


def snapshot(cluster: FakeCluster) -> dict[str, object]:
    """What users can see, without what differs from run to run."""
    found: dict[str, object] = {}
    for kind in kinds.OWNED:
        for body in cluster.all(kind):
            found[f"{kind.name} {kinds.name_of(body)}"] = body.get("spec") or body.get("data")
    conditions = cluster.one(kinds.LLM_DEPLOYMENT, *KEY)["status"]["conditions"]
    found["conditions"] = {c["type"]: (c["status"], c["reason"]) for c in conditions}
    found["pods"] = len(cluster.all(kinds.POD))
    return found


def fail_once(number: int, error: Exception):
    counted = []

    def hook(call: Call) -> None:
        counted.append(call)
        if len(counted) == number:
            raise error

    return hook


def test_lists_of_events_are_rate_limited():
    """Lists of events are costly: some at a time, and the others a moment later."""
    bench = OperatorBench()
    names = [f"m{number}" for number in range(40)]
    for name in names:
        bench.cluster.put(make_deployment(name))
        bench.reconcile(DeploymentKey("default", name))
    bench.workloads.sync()
    for pod in bench.pods():
        bench.workloads.set_condition(pod, "PodScheduled", "True")

    def requested() -> int:
        bench.cluster.calls.clear()
        for name in names:
            bench.reconcile(DeploymentKey("default", name))
        return sum(call.kind == kinds.EVENT and call.verb == "find" for call in bench.cluster.calls)

    assert requested() == 20
    bench.clock.advance(2.0)
    assert requested() == 10
