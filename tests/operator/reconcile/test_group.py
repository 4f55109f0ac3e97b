"""An LLMDeployment whose replicas are groups of pods, over an API server in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import DELETION_COST_ANNOTATION
from octavo_engine.protocol.state import AdapterState, EndpointState, PoolState, State
from octavo_operator.errors import ApiRefused
from octavo_operator.objects import kinds, labels
from octavo_operator.settings import OperatorSettings
from tests.fakes.operator import OperatorBench, running_operator

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Object
    from tests.fakes.cluster import Call

GROUP = {"size": 3, "secretRef": {"name": "between"}}


def running(**spec: Any) -> OperatorBench:
    return running_operator(**{"group": GROUP, "engine": {"device": "cpu"}, **spec})


def pods_of(bench: OperatorBench, component: str) -> list[Object]:
    return [
        pod
        for pod in bench.pods()
        if kinds.labels_of(pod)["app.kubernetes.io/component"] == component
    ]


def arguments(deployment: Object) -> list[str]:
    return list(deployment["spec"]["template"]["spec"]["containers"][0]["args"])


def workers(bench: OperatorBench) -> list[Object]:
    return [
        body
        for body in bench.engine_deployments()
        if kinds.labels_of(body)["app.kubernetes.io/component"] == "worker"
    ]


def places(bench: OperatorBench) -> set[tuple[str, str]]:
    """Of workers that run: the UID of their leader, and their rank."""
    return {
        (kinds.labels_of(pod)[labels.LEADER_LABEL], kinds.labels_of(pod)[labels.RANK_LABEL])
        for pod in pods_of(bench, "worker")
    }


def expected(bench: OperatorBench) -> set[tuple[str, str]]:
    return {
        (kinds.uid_of(pod), str(rank)) for pod in pods_of(bench, "engine") for rank in range(1, 3)
    }


def test_each_pod_that_serves_has_workers_of_its_own():
    bench = running()
    assert len(pods_of(bench, "engine")) == 2
    assert places(bench) == expected(bench)
    for body in workers(bench):
        (owner,) = body["metadata"]["ownerReferences"]
        (leader,) = (pod for pod in pods_of(bench, "engine") if kinds.uid_of(pod) == owner["uid"])
        assert (owner["kind"], owner["name"]) == ("Pod", kinds.name_of(leader))
        rank = kinds.labels_of(body)[labels.RANK_LABEL]
        assert f"--node-rank={rank}" in arguments(body)
        assert f"--master-addr={leader['status']['podIP']}" in arguments(body)
        assert "--nnodes=3" in arguments(body)
    # What is counted, scaled and routed to are those that serve.
    status = bench.deployment()["status"]
    assert (status["replicas"], status["routableReplicas"]) == (2, 2)
    assert "app.kubernetes.io/component=engine" in status["selector"]  # an HPA's
    assert bench.conditions()["Progressing"][:2] == ("False", "Complete")


def test_nothing_is_written_when_nothing_has_changed():
    bench = running()
    assert bench.calls_at_rest() == []


def test_a_worker_that_dies_is_replaced_without_the_operator():
    bench = running()
    bench.cluster.calls.clear()
    bench.workloads.kill(pods_of(bench, "worker")[0])
    bench.workloads.sync()
    assert places(bench) == expected(bench)
    assert bench.cluster.calls == []


def test_a_leader_that_dies_takes_its_workers_along_and_the_next_one_gets_its_own():
    bench = running()
    leader = pods_of(bench, "engine")[0]
    bench.workloads.kill(leader)
    bench.workloads.sync()
    assert kinds.uid_of(leader) not in {uid for uid, _ in places(bench)}
    bench.settle()
    assert len(pods_of(bench, "engine")) == 2
    assert places(bench) == expected(bench)


def test_workers_wait_for_the_address_of_their_leader_and_follow_it():
    bench = OperatorBench()
    bench.create(replicas=1, group=GROUP, engine={"device": "cpu"})
    bench.reconcile()
    bench.workloads.sync()
    (leader,) = pods_of(bench, "engine")
    bench.workloads.set_status(leader, {"podIP": None})
    bench.reconcile()
    assert workers(bench) == []
    for address in ("10.0.9.1", "fd00::9"):
        bench.workloads.set_status(leader, {"podIP": address})
        bench.reconcile()
        for body in workers(bench):
            assert f"--master-addr={address}" in arguments(body)
    assert len(workers(bench)) == 2


def test_the_least_busy_group_leaves_as_a_whole_once_it_has_drained():
    bench = running()
    bench.edit(replicas=1)
    bench.reconcile()
    going = [
        pod
        for pod in pods_of(bench, "engine")
        if kinds.annotations_of(pod).get(DELETION_COST_ANNOTATION)
    ]
    assert len(going) == 1
    # While it drains its workers compute on.
    bench.cluster.merge(
        kinds.POD, "default", kinds.name_of(going[0]),
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
    )  # fmt: skip
    bench.reconcile()
    assert {uid for uid, _ in places(bench)} >= {kinds.uid_of(going[0])}
    bench.settle()
    assert places(bench) == expected(bench)
    assert len(pods_of(bench, "engine")) == 1


def test_workers_of_a_pod_that_failed_and_is_still_there_are_removed():
    bench = running()
    leader = pods_of(bench, "engine")[0]
    bench.workloads.set_status(leader, {"phase": "Failed", "reason": "Evicted"})
    bench.reconcile()
    assert kinds.uid_of(leader) not in {
        kinds.labels_of(body)[labels.LEADER_LABEL] for body in workers(bench)
    }


def test_another_size_is_another_revision_and_rolls_out_group_by_group():
    bench = running()
    before = {kinds.uid_of(pod) for pod in pods_of(bench, "engine")}
    bench.edit(group={**GROUP, "size": 2})
    bench.settle()
    after = pods_of(bench, "engine")
    assert len(after) == 2
    assert not before & set(map(kinds.uid_of, after))
    assert places(bench) == {(kinds.uid_of(pod), "1") for pod in after}


def test_a_rejected_spec_still_replaces_the_workers_of_the_revision_that_serves():
    bench = running()
    bench.edit(engine={"device": "cpu", "tensorParallelSize": 2, "executor": "mp"})
    bench.reconcile()
    assert bench.conditions()["Accepted"][0] == "False"
    bench.workloads.kill(pods_of(bench, "engine")[0])
    bench.settle()
    assert places(bench) == expected(bench)


def test_a_stranger_s_object_of_a_worker_s_name_is_left_alone_and_named():
    bench = OperatorBench()
    bench.create(replicas=1, group=GROUP, engine={"device": "cpu"})
    bench.reconcile()
    bench.workloads.sync()
    twin = OperatorBench(bench.cluster, clock=bench.clock)
    twin.reconcile()
    name = kinds.name_of(workers(bench)[0])
    bench.cluster.remove(kinds.DEPLOYMENT, "default", name)
    bench.cluster.put(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"namespace": "default", "name": name},
            "spec": {"replicas": 5, "template": {"metadata": {"labels": {}}, "spec": {}}},
        }
    )
    bench.reconcile()
    assert bench.cluster.one(kinds.DEPLOYMENT, "default", name)["spec"]["replicas"] == 5
    assert name in bench.conditions()["Degraded"][2]


def test_what_keeps_a_worker_from_starting_is_said_about_the_deployment():
    bench = OperatorBench()
    bench.create(replicas=1, group=GROUP, engine={"device": "cpu"})
    for _ in range(2):
        bench.reconcile()
        bench.workloads.sync()
    pod = pods_of(bench, "worker")[0]
    unscheduled = {
        "type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient memory",
    }  # fmt: skip
    bench.workloads.set_status(pod, {"conditions": [unscheduled]})
    bench.reconcile()
    _, reason, message = bench.conditions()["Degraded"]
    assert reason == "InsufficientResources"
    rank = kinds.labels_of(pod)[labels.RANK_LABEL]
    assert f"pod {kinds.name_of(pod)}, rank {rank} of its group: " in message


def policies(bench: OperatorBench) -> list[Object]:
    return [
        body
        for body in bench.cluster.all(kinds.NETWORK_POLICY)
        if labels.LEADER_LABEL in kinds.labels_of(body)
    ]


def selected_by(bench: OperatorBench, policy: Object) -> set[str]:
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    return {kinds.name_of(pod) for pod in bench.pods() if wanted <= kinds.labels_of(pod).items()}


def group_of(bench: OperatorBench, leader: Object) -> set[str]:
    uid = kinds.uid_of(leader)
    workers = (
        w for w in pods_of(bench, "worker") if kinds.labels_of(w)[labels.LEADER_LABEL] == uid
    )
    return {kinds.name_of(leader), *map(kinds.name_of, workers)}


def test_each_group_has_a_policy_that_selects_its_pods_and_no_others():
    bench = running()
    found = {frozenset(selected_by(bench, policy)) for policy in policies(bench)}
    assert found == {frozenset(group_of(bench, pod)) for pod in pods_of(bench, "engine")}
    assert all(len(pods) == 3 for pods in found)


def test_a_policy_that_was_changed_and_a_label_that_was_removed_come_back():
    bench = running()
    policy, leader = policies(bench)[0], pods_of(bench, "engine")[0]
    bench.cluster.merge(
        kinds.NETWORK_POLICY, "default", kinds.name_of(policy), {"spec": {"ingress": [{}]}}
    )
    bench.cluster.merge(
        kinds.POD, "default", kinds.name_of(leader),
        {"metadata": {"labels": {labels.LEADER_LABEL: None}}},
    )  # fmt: skip
    bench.settle()
    assert policies(bench)[0]["spec"]["ingress"] == policy["spec"]["ingress"]
    assert all(len(selected_by(bench, each)) == 3 for each in policies(bench))
    assert bench.calls_at_rest() == []


def test_a_group_that_has_left_takes_its_policy_along():
    bench = running()
    bench.edit(replicas=1)
    bench.settle()
    assert [len(selected_by(bench, policy)) for policy in policies(bench)] == [3]
    leader = pods_of(bench, "engine")[0]
    bench.workloads.set_status(leader, {"phase": "Failed", "reason": "Evicted"})
    bench.reconcile()
    assert all(kinds.controller_uid(each) != kinds.uid_of(leader) for each in policies(bench))


def test_without_network_policies_there_are_none_of_groups():
    bench = OperatorBench(settings=replace(OperatorSettings(), network_policy=False))
    bench.create(replicas=1, group=GROUP, engine={"device": "cpu"})
    bench.settle()
    assert bench.cluster.all(kinds.NETWORK_POLICY) == []
    assert len(pods_of(bench, "worker")) == 2


def test_a_leader_that_cannot_be_labelled_is_named():
    bench = OperatorBench()
    bench.create(replicas=1, group=GROUP, engine={"device": "cpu"})
    bench.reconcile()
    bench.workloads.sync()
    (leader,) = pods_of(bench, "engine")

    def refuse(call: Call) -> None:
        if (call.verb, call.kind) == ("patch", kinds.POD):
            raise ApiRefused("cannot patch resource pods", status=403)

    bench.cluster.before = refuse
    bench.reconcile()
    assert kinds.name_of(leader) in bench.conditions()["Degraded"][2]


def test_the_loading_state_names_the_slowest_rank():
    bench = OperatorBench()
    bench.create(replicas=1, group=GROUP, engine={"device": "cpu"})
    for _ in range(2):
        bench.reconcile()
        bench.workloads.sync()
    runs = {"name": "engine", "ready": False, "state": {"running": {}}}
    fetches = {"name": "fetch", "state": {"running": {}}}
    (leader,) = pods_of(bench, "engine")
    first, second = sorted(
        pods_of(bench, "worker"), key=lambda pod: kinds.labels_of(pod)[labels.RANK_LABEL]
    )
    bench.workloads.set_status(leader, {"containerStatuses": [runs]})
    bench.workloads.set_status(second, {"initContainerStatuses": [fetches]})

    def loading() -> Object:
        bench.clock.now += 60.0
        bench.reconcile()
        return dict(bench.deployment()["status"]["loading"])

    assert loading() == {
        "phase": "Pending",
        "pod": kinds.name_of(first),
        "message": "Its group waits for rank 1, which does not run yet.",
    }
    bench.workloads.set_status(first, {"containerStatuses": [{**runs, "ready": True}]})
    assert loading() == {"phase": "Fetching", "pod": kinds.name_of(second), "message": "Rank 2"}
    line = '{"phase": "fetching", "bytes": 512, "total": 1024}'
    bench.cluster.logs[kinds.name_of(second)] = line
    assert loading()["message"].startswith("Rank 2: Fetching weights: 0.5 of 1.0 KiB")
    # All run: from here on the pod that serves says how far it is.
    bench.workloads.set_status(
        second, {"initContainerStatuses": [], "containerStatuses": [{**runs, "ready": True}]}
    )
    assert loading()["pod"] == kinds.name_of(leader)
    bench.workloads.set_status(leader, {"containerStatuses": [{**runs, "ready": True}]})
    assert loading()["phase"] == "Ready"


def test_adapters_come_and_go_and_no_pod_of_a_group_is_replaced():
    bench = running(lora={})
    before = {kinds.uid_of(pod) for pod in bench.pods()}
    adapter = {"name": "law", "uri": "file:///adapters/law"}

    def routed() -> list[Object]:
        service = bench.cluster.one(kinds.SERVICE, "default", "smollm2")
        text = service["metadata"]["annotations"]["octavo.dev/routing"]
        return list(json.loads(text).get("adapters", ()))

    bench.edit(adapters=[adapter])
    bench.settle()
    assert routed() == [{"name": "law", "uri": "/adapters/law"}]
    leaders = {kinds.uid_of(pod): kinds.name_of(pod) for pod in pods_of(bench, "engine")}
    bench.clock.now += 60.0
    bench.demand.expect(["router-0"])
    endpoints = [
        EndpointState(uid, "default/smollm2", "", "http://x", "ready", adapters=["law"])
        for uid in leaders
    ]
    states = [AdapterState("law", "loaded")]
    pool = PoolState("default/smollm2", adapters=states)
    bench.demand.learn("router-0", State("epoch", "router-0", [pool], endpoints))
    bench.reconcile()
    (listed,) = bench.deployment()["status"]["adapters"]
    assert (listed["phase"], set(listed["pods"])) == ("Loaded", set(leaders.values()))
    bench.edit(adapters=[])
    bench.settle()
    assert routed() == []
    assert {kinds.uid_of(pod) for pod in bench.pods()} == before
    # Each pod of a group has room for them, and the folders that the template mounts.
    maps = bench.cluster.all(kinds.CONFIG_MAP)
    assert all("enable-lora = true" in "".join(body["data"].values()) for body in maps)


def test_workers_are_no_rollout_of_their_own():
    """Else two groups would take all places of rollouts for ever."""
    bench = running()
    assert bench.world.rolling() == []
