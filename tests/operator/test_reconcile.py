"""One LLMDeployment from creation to deletion, over an API server in memory."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from octavo_operator import kinds
from octavo_operator.cluster import Listing
from octavo_operator.errors import ClusterUnavailable, Conflict, Refused
from octavo_operator.observe import Key
from tests.fakes.operator import KEY, OperatorBench, make_deployment, make_state

if TYPE_CHECKING:
    from tests.fakes.cluster import Call, FakeCluster

UNSETTLED = {"engine": {"maxNumSeqs": 7}}


class Killed(BaseException):
    """SIGKILL, as far as Python can have one."""


def running(**spec) -> OperatorBench:
    bench = OperatorBench()
    bench.create(**{"replicas": 2, **spec})
    bench.settle()
    return bench


def verbs(calls: list[Call]) -> list[tuple[str, str]]:
    return [(call.verb, call.kind.name) for call in calls]


class TestCreate:
    def test_children_come_in_an_order_of_which_every_prefix_is_safe(self):
        bench = OperatorBench()
        bench.create(replicas=2)
        bench.reconcile()
        assert verbs(bench.cluster.writes) == [
            ("apply", "ServiceAccount"),
            ("apply", "ConfigMap"),
            ("apply", "Service"),
            ("apply", "Service"),
            ("apply", "NetworkPolicy"),
            ("apply", "PodDisruptionBudget"),
            ("apply", "Deployment"),
            ("create", "Event"),
            ("apply_status", "LLMDeployment"),
        ]

    def test_it_serves_once_the_engines_are_routable(self):
        bench = running()
        assert bench.conditions()["Ready"] == ("True", "Serving", "2 of 2 replicas serve.")
        assert bench.deployment()["status"]["routableReplicas"] == 2
        assert bench.deployment()["status"]["rollout"] == {"stable": next(iter(bench.engines()))}

    def test_nothing_is_written_when_nothing_has_changed(self):
        bench = running()
        bench.cluster.calls.clear()
        bench.clock.advance(3600)
        bench.reconcile()
        assert bench.cluster.calls == []
        restarted = OperatorBench(bench.cluster, clock=bench.clock)
        restarted.reconcile()
        assert bench.cluster.calls == []

    def test_a_spec_that_cannot_be_served_is_told_once_and_costs_nothing(self):
        bench = OperatorBench()
        bench.create(engine={"executor": "ray"})
        bench.reconcile()
        status, reason, message = bench.conditions()["Accepted"]
        assert (status, reason) == ("False", "Unsupported")
        assert message.startswith("spec.engine.executor ray needs a Ray cluster")
        assert bench.conditions()["Ready"][0] == "False"
        bench.cluster.calls.clear()
        bench.reconcile()
        assert bench.cluster.calls == []

    def test_a_refused_edit_leaves_what_runs_running(self):
        bench = running()
        before = bench.engines()
        bench.edit(engine={"executor": "ray"})
        bench.settle()
        assert bench.engines() == before
        assert bench.conditions()["Accepted"][0] == "False"
        assert bench.conditions()["Ready"][0] == "True"
        bench.edit(engine={"executor": "uni"})
        bench.settle()
        assert bench.conditions()["Accepted"] == ("True", "Accepted", "The spec is valid.")
        assert bench.engines() == before


class TestEdit:
    def test_a_new_revision_replaces_the_old_one_and_leaves_nothing_behind(self):
        bench = running()
        (old,) = bench.engines()
        bench.edit(**UNSETTLED)
        bench.settle()
        (new,) = bench.engines()
        assert new != old
        assert {kinds.labels_of(pod)["octavo.dev/revision"] for pod in pods(bench)} == {new}
        names = [kinds.name_of(body) for body in bench.cluster.all(kinds.CONFIG_MAP)]
        assert names == [f"smollm2-{new}"]

    def test_a_revert_mid_way_never_costs_a_serving_replica(self):
        bench = running(replicas=3)
        (old,) = bench.engines()
        bench.edit(**UNSETTLED)
        bench.reconcile()
        bench.workloads.sync()
        assert sorted(bench.engines().values()) == [1, 3]
        bench.edit(engine={"maxNumSeqs": None})
        bench.settle()
        assert bench.engines() == {old: 3}

    def test_scaling_marks_the_least_busy_pod_and_nobody_else(self):
        bench = running(replicas=3)
        uids = [kinds.uid_of(pod) for pod in pods(bench)]
        bench.demand.expect(["router-0"])
        busy = {uids[0]: 4, uids[1]: 0, uids[2]: 2}
        bench.demand.learn("router-0", make_state(ready=tuple(uids), busy=busy))
        bench.edit(replicas=2)
        bench.settle()
        assert [kinds.uid_of(pod) for pod in pods(bench)] == [uids[0], uids[2]]

    def test_kubectl_scale_and_suspend(self):
        bench = running()
        bench.edit(replicas=4)
        bench.settle()
        assert bench.num_ready() == 4
        bench.edit(suspend=True)
        bench.settle()
        assert bench.num_ready() == 0
        assert bench.conditions()["Ready"][:2] == ("False", "Suspended")
        bench.edit(suspend=False)
        bench.settle()
        assert bench.num_ready() == 4

    def test_a_field_that_is_no_longer_asked_for_is_removed(self):
        bench = running()
        extra = {"metadata": {"annotations": {"team": "a"}}}
        bench.edit(podTemplate=extra)
        bench.settle()
        (pod,) = {
            json.dumps(kinds.annotations_of(d["spec"]["template"])) for d in deployments(bench)
        }
        assert '"team": "a"' in pod
        bench.edit(podTemplate=None)
        bench.settle()
        (pod,) = {
            json.dumps(kinds.annotations_of(d["spec"]["template"])) for d in deployments(bench)
        }
        assert "team" not in pod


class TestDrift:
    def test_what_others_changed_of_ours_is_put_right_with_one_write(self):
        bench = running()
        bench.cluster.merge(
            kinds.SERVICE,
            "default",
            "smollm2",
            {"spec": {"selector": {"octavo.dev/deployment": "x"}}},
        )
        bench.cluster.calls.clear()
        bench.reconcile()
        assert [v for v in verbs(bench.cluster.writes) if v[1] != "Event"] == [("apply", "Service")]
        service = bench.cluster.one(kinds.SERVICE, "default", "smollm2")
        assert service["spec"]["selector"]["octavo.dev/deployment"] == "smollm2"

    def test_what_others_added_is_left_alone(self):
        bench = running()
        note = {"metadata": {"annotations": {"note": "mine"}}}
        bench.cluster.merge(kinds.SERVICE, "default", "smollm2", note)
        bench.cluster.calls.clear()
        bench.reconcile()
        assert bench.cluster.writes == []
        bench.edit(routing={"holdTimeout": "5s"})
        bench.settle()
        service = bench.cluster.one(kinds.SERVICE, "default", "smollm2")
        assert kinds.annotations_of(service)["note"] == "mine"

    def test_lost_marks_are_written_again_and_roll_no_pod(self):
        bench = running()
        before = [kinds.uid_of(pod) for pod in pods(bench)]
        (deployment,) = deployments(bench)
        bench.cluster.merge(
            kinds.DEPLOYMENT,
            "default",
            kinds.name_of(deployment),
            {"metadata": {"annotations": None}},
        )
        bench.settle()
        assert [kinds.uid_of(pod) for pod in pods(bench)] == before

    @pytest.mark.parametrize("kind", [kinds.SERVICE, kinds.CONFIG_MAP, kinds.DEPLOYMENT])
    def test_what_others_deleted_comes_back(self, kind):
        bench = running()
        name = kinds.name_of(bench.cluster.all(kind)[0])
        bench.cluster.remove(kind, "default", name)
        bench.settle()
        assert bench.cluster.has(kind, "default", name)
        assert bench.num_ready() == 2


class TestNames:
    def test_a_strangers_object_is_never_touched(self):
        bench = OperatorBench()
        theirs = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": "default", "name": "smollm2"},
            "spec": {"selector": {"app": "theirs"}},
        }
        stored = bench.cluster.put(theirs)
        bench.create()
        bench.reconcile()
        assert bench.cluster.one(kinds.SERVICE, "default", "smollm2") == stored
        status, reason, message = bench.conditions()["Accepted"]
        assert (status, reason) == ("False", "NameConflict")
        assert "Service smollm2 exists and belongs to nobody" in message
        bench.cluster.remove(kinds.SERVICE, "default", "smollm2")
        bench.settle()
        assert bench.conditions()["Ready"][0] == "True"

    def test_children_of_a_deleted_namesake_are_waited_for(self):
        bench = running()
        leftover = bench.cluster.one(kinds.SERVICE, "default", "smollm2")
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        del leftover["metadata"]["resourceVersion"]
        bench.cluster.put(leftover)  # not collected yet
        bench.create(replicas=1)
        outcome = bench.reconcile()
        assert outcome.again_after_s == pytest.approx(1.0)
        assert "of a deleted LLMDeployment to vanish" in bench.conditions()["Progressing"][2]
        bench.cluster.remove(kinds.SERVICE, "default", "smollm2")
        bench.settle()
        assert bench.conditions()["Ready"][0] == "True"

    def test_the_status_of_a_namesake_is_not_written_by_a_late_reconcile(self):
        bench = running()
        bench.deliver()
        old = bench.deployment()
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        bench.cluster.put(make_deployment(replicas=1))
        assert asyncio.run(bench.reconciler.reconcile(KEY)).is_failed is False
        assert bench.deployment()["metadata"]["uid"] != old["metadata"]["uid"]
        assert "status" not in bench.deployment()

    def test_of_two_that_serve_one_name_the_older_wins(self):
        bench = running()
        late = make_deployment("late", model={"uri": "demo://smollm2", "servedName": "smollm2"})
        late["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
        bench.cluster.put(late)
        outcome = bench.reconcile(Key("default", "late"))
        assert outcome.again_after_s == 30.0
        body = bench.cluster.one(kinds.LLM_DEPLOYMENT, "default", "late")
        accepted = body["status"]["conditions"][0]
        assert (accepted["status"], accepted["reason"]) == ("False", "ServedNameConflict")
        assert "smollm2 is served by LLMDeployment smollm2" in accepted["message"]
        bench.settle()
        assert bench.conditions()["Ready"][0] == "True"
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        bench.settle(Key("default", "late"))
        body = bench.cluster.one(kinds.LLM_DEPLOYMENT, "default", "late")
        assert {c["type"]: c["status"] for c in body["status"]["conditions"]}["Ready"] == "True"


class TestDelete:
    def test_a_deleted_resource_is_forgotten(self):
        bench = running()
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        assert bench.reconcile().is_gone
        assert bench.cluster.all(kinds.DEPLOYMENT) == []

    def test_a_missed_deletion_makes_nothing_anew(self):
        """The watch was away while it was deleted: the cache still has it."""
        bench = running()
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        bench.world.replace(kinds.SERVICE, Listing([], 1 << 62))  # only this was noticed
        bench.cluster.calls.clear()
        outcome = asyncio.run(bench.reconciler.reconcile(KEY))
        assert outcome.is_gone
        assert bench.cluster.writes == []


class TestTrouble:
    @pytest.mark.parametrize(
        "error",
        [
            ClusterUnavailable("overloaded", status=429, retry_after_s=7.0),
            ClusterUnavailable("down"),
            Conflict("changed", status=409),
            Refused("no", status=422),
        ],
    )
    def test_any_error_at_any_call_is_survived(self, error):
        reference = running()
        for number in range(1, len(reference.cluster.calls)):
            bench = OperatorBench()
            bench.create(replicas=2)
            bench.cluster.before = fail_once(number, error)
            bench.settle(rounds=60)
            assert snapshot(bench.cluster) == snapshot(reference.cluster), number

    def test_the_servers_wish_for_patience_reaches_the_queue(self):
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
                raise Refused("exceeded quota: q, requested: configmaps=1", status=403)

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
                raise Refused("forbidden", status=403)

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
        (pod,) = pods(bench)
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

    def test_only_events_tell_of_a_failing_mount(self):
        bench = OperatorBench()
        bench.create(replicas=1)
        bench.reconcile()
        bench.workloads.sync()
        (pod,) = pods(bench)
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


class TestRouters:
    def test_a_pod_is_routable_when_all_router_replicas_have_it(self):
        bench = OperatorBench()
        bench.demand.expect(["router-0", "router-1"])
        bench.create(replicas=1)
        bench.reconcile()
        bench.workloads.sync()
        (pod,) = pods(bench)
        bench.workloads.make_ready(pod)
        uid = kinds.uid_of(pod)
        bench.demand.learn("router-0", make_state(ready=(uid,)))
        bench.reconcile()
        assert bench.conditions()["Degraded"][0] == "False"  # they have just met
        bench.clock.advance(16)
        bench.demand.learn("router-0", make_state(ready=(uid,)))
        bench.reconcile()
        assert bench.conditions()["Ready"][:2] == ("False", "NotRoutable")
        bench.demand.learn("router-1", make_state(replica="router-1", ready=(uid,)))
        bench.settle()
        assert bench.conditions()["Ready"][:2] == ("True", "Serving")

    def test_an_operator_that_knows_no_routers_yet_opens_no_gate(self):
        bench = OperatorBench()
        bench.demand = type(bench.demand)(bench.clock)
        bench.reconciler._demand = bench.demand
        bench.create(replicas=1)
        bench.reconcile()
        bench.workloads.sync()
        bench.workloads.make_all_ready()
        bench.reconcile()
        bench.workloads.update_all()
        assert bench.num_ready() == 0


class TestKilled:
    """O01-O07: before and after each write; it ends as an undisturbed run does."""

    @pytest.mark.parametrize("story", ["create", "edit", "scale up", "scale down", "revert"])
    def test_at_every_write(self, story):
        reference, _ = play(story, None)
        total = len(reference.cluster.writes)
        assert total > 3
        for number in range(1, total + 1):
            for is_after in (False, True):
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
        bench = running(replicas=3 if story == "scale down" else 2)
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


def pods(bench: OperatorBench) -> list[kinds.Object]:
    return sorted(bench.cluster.all(kinds.POD), key=kinds.name_of)


def deployments(bench: OperatorBench) -> list[kinds.Object]:
    return bench.cluster.all(kinds.DEPLOYMENT)


def test_what_was_deleted_is_not_deleted_again_where_the_watch_is_deaf():
    bench = running()
    bench.unheard = frozenset((kinds.CONFIG_MAP,))
    bench.edit(engine={"maxNumSeqs": 7})
    bench.settle()
    for _ in range(5):
        bench.reconcile()
    deleted = [call.kind for call in bench.cluster.calls if call.verb == "delete"]
    assert deleted == [kinds.DEPLOYMENT, kinds.CONFIG_MAP]
