"""Users, controllers and namesakes act on our objects: what is ours is put right, the rest left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from octavo_operator.cluster.api import Listing
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.objects import kinds
from tests.fakes.operator import KEY, OperatorBench, make_deployment, running_operator, verbs

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_operator.objects.kinds import Kind
    from tests.fakes.cluster import Call


class TestDrift:
    def test_what_others_changed_of_ours_is_put_right_with_one_write(self):
        bench = running_operator()
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
        bench = running_operator()
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
        bench = running_operator()
        before = [kinds.uid_of(pod) for pod in bench.pods()]
        (deployment,) = bench.engine_deployments()
        bench.cluster.merge(
            kinds.DEPLOYMENT,
            "default",
            kinds.name_of(deployment),
            {"metadata": {"annotations": None}},
        )
        bench.settle()
        assert [kinds.uid_of(pod) for pod in bench.pods()] == before

    @pytest.mark.parametrize("kind", [kinds.SERVICE, kinds.CONFIG_MAP, kinds.DEPLOYMENT])
    def test_what_others_deleted_comes_back(self, kind):
        bench = running_operator()
        name = kinds.name_of(bench.cluster.all(kind)[0])
        bench.cluster.remove(kind, "default", name)
        bench.settle()
        assert bench.cluster.has(kind, "default", name)
        assert bench.num_ready() == 2


class TestBetweenLookAndWrite:
    """What was looked at is what is changed, and nothing that took its place."""

    def change(self, bench: OperatorBench, kind: Kind, act: Callable[[], object]) -> None:
        """`act` comes just before our next apply of this kind."""

        def hook(call: Call) -> None:
            if call.verb == "apply" and call.kind == kind:
                bench.cluster.before = lambda call: None
                act()

        bench.cluster.before = hook

    def test_an_object_that_was_exchanged_is_not_touched(self):
        bench = running_operator()
        place = (kinds.DISRUPTION_BUDGET, "default", "smollm2")
        theirs = {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"namespace": "default", "name": "smollm2"},
            "spec": {"minAvailable": 7},
        }

        def exchange() -> None:
            bench.cluster.remove(*place)
            bench.cluster.put(theirs)

        self.change(bench, kinds.DISRUPTION_BUDGET, exchange)
        bench.edit(rollout={"maxUnavailable": 2})
        assert bench.reconcile().is_failed
        assert bench.cluster.one(*place)["spec"] == {"minAvailable": 7}

    def test_an_edit_of_others_is_seen_before_it_is_written_over(self):
        bench = running_operator()
        place = (kinds.SERVICE, "default", "smollm2")
        added = {"metadata": {"annotations": {"note": "mine"}}}
        self.change(bench, kinds.SERVICE, lambda: bench.cluster.merge(*place, added))
        bench.edit(routing={"holdTimeout": "5s"})
        assert bench.reconcile().is_failed
        bench.settle()
        annotations = kinds.annotations_of(bench.cluster.one(*place))
        assert annotations["note"] == "mine"
        assert '"holdSeconds":5' in annotations["octavo.dev/routing"].replace(" ", "")


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
        assert "Service smollm2 exists and has no owner" in message
        bench.cluster.remove(kinds.SERVICE, "default", "smollm2")
        bench.settle()
        assert bench.conditions()["Ready"][0] == "True"

    def test_children_of_a_deleted_namesake_are_waited_for(self):
        bench = running_operator()
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
        bench = running_operator()
        bench.deliver()
        old = bench.deployment()
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        bench.cluster.put(make_deployment(replicas=1))
        assert asyncio.run(bench.reconciler.reconcile(KEY)).is_failed is False
        assert bench.deployment()["metadata"]["uid"] != old["metadata"]["uid"]
        assert "status" not in bench.deployment()

    def test_of_two_that_serve_one_name_the_older_wins(self):
        bench = running_operator()
        late = make_deployment("late", model={"uri": "demo://smollm2", "servedName": "smollm2"})
        late["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
        bench.cluster.put(late)
        outcome = bench.reconcile(DeploymentKey("default", "late"))
        assert outcome.again_after_s == 30.0
        body = bench.cluster.one(kinds.LLM_DEPLOYMENT, "default", "late")
        accepted = body["status"]["conditions"][0]
        assert (accepted["status"], accepted["reason"]) == ("False", "ServedNameConflict")
        assert (
            "the name smollm2, which already belongs to LLMDeployment smollm2"
            in accepted["message"]
        )
        bench.settle()
        assert bench.conditions()["Ready"][0] == "True"
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        bench.settle(DeploymentKey("default", "late"))
        body = bench.cluster.one(kinds.LLM_DEPLOYMENT, "default", "late")
        assert {c["type"]: c["status"] for c in body["status"]["conditions"]}["Ready"] == "True"

    def test_a_name_is_owned_across_namespaces(self):
        """Routers know a model by its name alone: who claims it too gets some of its prompts."""
        bench = running_operator()
        key = DeploymentKey("tenant-b", "copy")
        late = make_deployment(*reversed(key), model={"uri": "demo://x", "aliases": ["smollm2"]})
        late["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
        bench.cluster.put(late)
        assert bench.reconcile(key).again_after_s == 30.0
        message = accepted_condition(bench, key)[1]
        assert "already belongs to LLMDeployment smollm2 in namespace default" in message
        assert bench.cluster.all(kinds.SERVICE, "tenant-b") == []
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        bench.settle(key)
        assert accepted_condition(bench, key) == ("True", "The spec is valid.")

    def test_an_older_deployment_that_adds_a_name_comes_after_the_one_that_has_it(self):
        bench = running_operator()
        key = DeploymentKey("tenant-b", "old")
        old = make_deployment(*reversed(key), model={"uri": "demo://x"})
        old["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
        bench.cluster.put(old)
        bench.settle(key)
        edit = {"spec": {"model": {"aliases": ["smollm2"]}}}
        bench.cluster.merge(kinds.LLM_DEPLOYMENT, *key, edit)
        bench.settle(key)
        assert (
            "which already belongs to LLMDeployment smollm2 in namespace default"
            in accepted_condition(bench, key)[1]
        )
        service = bench.cluster.one(kinds.SERVICE, *key)
        assert "smollm2" not in kinds.annotations_of(service)["octavo.dev/routing"]
        bench.settle()
        assert bench.conditions()["Accepted"][0] == "True"
        again = OperatorBench(bench.cluster, clock=bench.clock)
        again.settle()
        assert again.conditions()["Accepted"][0] == "True"

    def test_a_stranger_among_the_children_does_not_stop_the_rest(self):
        """A Service that somebody put in the place of ours: pods still become routable, scaling
        goes on."""
        bench = running_operator()
        bench.cluster.remove(kinds.SERVICE, "default", "smollm2")
        meta = {"namespace": "default", "name": "smollm2"}
        bench.cluster.put({"apiVersion": "v1", "kind": "Service", "metadata": meta})
        bench.workloads.kill(bench.pods()[0])
        bench.workloads.sync()
        bench.edit(replicas=3)
        bench.settle()
        assert bench.num_ready() == 3
        assert bench.conditions()["Accepted"][:2] == ("False", "NameConflict")
        assert bench.conditions()["Ready"][0] == "True"


def accepted_condition(bench: OperatorBench, key: DeploymentKey) -> tuple[str, str]:
    conditions = bench.cluster.one(kinds.LLM_DEPLOYMENT, *key)["status"]["conditions"]
    (found,) = (c for c in conditions if c["type"] == "Accepted")
    return found["status"], found["message"]


class TestDelete:
    def test_a_deleted_resource_is_forgotten(self):
        bench = running_operator()
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        assert bench.reconcile().is_gone
        assert bench.cluster.all(kinds.DEPLOYMENT) == []

    def test_one_that_waits_for_the_finalizer_of_another_is_left_alone(self):
        bench = running_operator()
        leaving = {"deletionTimestamp": "2026-01-01T01:00:00Z", "finalizers": ["example.com/mine"]}
        bench.cluster.merge(kinds.LLM_DEPLOYMENT, *KEY, {"metadata": leaving})
        bench.cluster.calls.clear()
        bench.reconcile()
        bench.edit(replicas=5, engine={"maxNumSeqs": 7})
        bench.reconcile()
        bench.cluster.remove(kinds.SERVICE, "default", "smollm2")
        bench.reconcile()
        assert bench.cluster.writes == []
        assert leaving.items() <= bench.deployment()["metadata"].items()

    def test_a_missed_deletion_makes_nothing_anew(self):
        """The watch was away while it was deleted: the cache still has it."""
        bench = running_operator()
        bench.cluster.remove(kinds.LLM_DEPLOYMENT, *KEY)
        bench.world.replace(kinds.SERVICE, Listing([], 1 << 62))  # only this was noticed
        bench.cluster.calls.clear()
        outcome = asyncio.run(bench.reconciler.reconcile(KEY))
        assert outcome.is_gone
        assert bench.cluster.writes == []


def test_what_was_deleted_is_not_deleted_again_where_the_watch_is_deaf():
    bench = running_operator()
    bench.unheard = frozenset((kinds.CONFIG_MAP,))
    bench.edit(engine={"maxNumSeqs": 7})
    bench.settle()
    for _ in range(5):
        bench.reconcile()
    deleted = [call.kind for call in bench.cluster.calls if call.verb == "delete"]
    assert deleted == [kinds.DEPLOYMENT, kinds.CONFIG_MAP]
