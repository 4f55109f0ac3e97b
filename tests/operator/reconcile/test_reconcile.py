"""One LLMDeployment from creation to serving, edited and scaled, over an API server in memory."""

from __future__ import annotations

import json
from dataclasses import replace

from octavo_operator.objects import kinds
from tests.fakes.operator import OperatorBench, make_state, running_operator, verbs

UNSETTLED = {"engine": {"maxNumSeqs": 7}}
TO_ZERO = {"maxReplicas": 4, "scaleToZero": {"after": "60s"}}


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
        bench = running_operator()
        assert bench.conditions()["Ready"] == ("True", "Serving", "2 of 2 replicas serve.")
        assert bench.deployment()["status"]["routableReplicas"] == 2
        assert bench.deployment()["status"]["rollout"] == {"stable": next(iter(bench.engines()))}

    def test_nothing_is_written_when_nothing_has_changed(self):
        bench = running_operator()
        bench.cluster.calls.clear()
        bench.clock.advance(3600)
        bench.reconcile()
        assert bench.cluster.calls == []
        restarted = OperatorBench(bench.cluster, clock=bench.clock)
        restarted.reconcile()
        assert bench.cluster.calls == []

    def test_a_spec_that_cannot_be_served_is_reported_once(self):
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
        bench = running_operator()
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
        bench = running_operator()
        (old,) = bench.engines()
        bench.edit(**UNSETTLED)
        bench.settle()
        (new,) = bench.engines()
        assert new != old
        assert {kinds.labels_of(pod)["octavo.dev/revision"] for pod in bench.pods()} == {new}
        names = [kinds.name_of(body) for body in bench.cluster.all(kinds.CONFIG_MAP)]
        assert names == [f"smollm2-{new}"]

    def test_a_revert_mid_way_never_costs_a_serving_replica(self):
        bench = running_operator(replicas=3)
        (old,) = bench.engines()
        bench.edit(**UNSETTLED)
        bench.reconcile()
        bench.workloads.sync()
        assert sorted(bench.engines().values()) == [1, 3]
        bench.edit(engine={"maxNumSeqs": None})
        bench.settle()
        assert bench.engines() == {old: 3}

    def test_scaling_marks_only_the_least_busy_pod(self):
        bench = running_operator(replicas=3)
        uids = [kinds.uid_of(pod) for pod in bench.pods()]
        bench.demand.expect(["router-0"])
        busy = {uids[0]: 4, uids[1]: 0, uids[2]: 2}
        bench.demand.learn("router-0", make_state(ready=tuple(uids), busy=busy))
        bench.edit(replicas=2)
        bench.settle()
        assert [kinds.uid_of(pod) for pod in bench.pods()] == [uids[0], uids[2]]

    def test_kubectl_scale_and_suspend(self):
        bench = running_operator()
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

    def test_a_field_that_is_no_longer_set_is_removed(self):
        bench = running_operator()
        extra = {"metadata": {"annotations": {"team": "a"}}}
        bench.edit(podTemplate=extra)
        bench.settle()
        (pod,) = {
            json.dumps(kinds.annotations_of(d["spec"]["template"]))
            for d in bench.engine_deployments()
        }
        assert '"team": "a"' in pod
        bench.edit(podTemplate=None)
        bench.settle()
        (pod,) = {
            json.dumps(kinds.annotations_of(d["spec"]["template"]))
            for d in bench.engine_deployments()
        }
        assert "team" not in pod


class TestRouters:
    def test_a_pod_is_routable_when_all_router_replicas_have_it(self):
        bench = OperatorBench()
        bench.demand.expect(["router-0", "router-1"])
        bench.create(replicas=1)
        bench.reconcile()
        bench.workloads.sync()
        (pod,) = bench.pods()
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


class TestScaleToZero:
    def test_a_silent_router_or_a_busy_engine_keeps_it_from_zero(self):
        bench = running_operator(replicas=1, autoscaling=TO_ZERO)
        bench.demand.expect(["router-0", "router-1"])
        (pod,) = bench.pods()
        uid = kinds.uid_of(pod)
        idle = make_state(ready=(uid,), last_request_age_s=900.0)
        bench.demand.learn("router-0", idle)
        bench.reconcile()  # the other one may have a hundred requests there
        assert sum(bench.engines().values()) == 1
        engine = replace(idle.endpoints[0], running=1)
        bench.demand.learn("router-1", replace(idle, replica="router-1", endpoints=[engine]))
        bench.reconcile()
        assert sum(bench.engines().values()) == 1
        bench.demand.learn("router-1", replace(idle, replica="router-1"))
        bench.settle()
        assert sum(bench.engines().values()) == 0


def test_a_fall_in_load_takes_one_pod_a_minute_where_the_step_is_one():
    """A deletion is decided again on objects read anew: that is no second step of its minute."""
    scaling = {
        "maxReplicas": 6,
        "targets": {"inFlight": 4},
        "behavior": {"scaleDown": {"window": "10s", "step": 1}},
    }
    bench = running_operator(replicas=4, autoscaling=scaling)
    bench.demand.expect(["router-0"])
    counts = []
    for _ in range(30):
        ready = tuple(kinds.uid_of(pod) for pod in bench.pods())
        bench.demand.learn("router-0", make_state(ready=ready))
        bench.settle()
        counts.append(sum(bench.engines().values()))
        bench.clock.advance(5.0)
    assert [counts.count(number) for number in (3, 2)] == [12, 12]
    assert counts[-1] == 1
