"""The pods of a group: what a worker has of its leader, and what the engine makes of both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from octavo_engine.protocol.endpoints import LEADER_PORT
from octavo_operator.desired import desired_objects
from octavo_operator.desired.group import group_policy, leader_labels, worker_deployment
from octavo_operator.objects import kinds, labels
from octavo_operator.settings import POD_MONITOR, SCALED_OBJECT
from tests.fakes.deployments import make_deployment, with_images

SPEC = {
    "group": {"size": 3, "secretRef": {"name": "between"}},
    "engine": {"device": "cpu", "args": {"max-queue": 4}},
    "podTemplate": {"spec": {"nodeSelector": {"zone": "a"}, "containers": [
        {"name": "sidecar", "image": "sidecar:1", "args": ["--node-rank=0"]}
    ]}},
}  # fmt: skip


def leader_deployment() -> dict[str, Any]:
    objects = desired_objects(make_deployment(SPEC), with_images())
    (body,) = (each for each in objects if each["kind"] == "Deployment")
    return body


def worker(rank: int = 2, address: str = "10.1.2.3") -> dict[str, Any]:
    pod = {"metadata": {"name": "a-pod", "uid": "u-1"}, "status": {"podIP": address}}
    return worker_deployment(leader_deployment(), pod, rank)


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def test_a_worker_runs_what_its_leader_runs_under_another_rank():
    leader, own = container(leader_deployment()), container(worker())
    swapped = {
        "--node-rank=0": "--node-rank=2",
        "--master-addr=$(OCTAVO_POD_IP)": "--master-addr=10.1.2.3",
    }
    assert own["args"] == [swapped.get(each, each) for each in leader["args"]]
    assert set(swapped) <= set(leader["args"])
    for part in ("image", "command", "env", "resources", "securityContext", "volumeMounts"):
        assert own[part] == leader[part]
    spec = worker()["spec"]["template"]["spec"]
    assert spec["volumes"] == leader_deployment()["spec"]["template"]["spec"]["volumes"]
    assert spec["nodeSelector"] == {"zone": "a"}
    assert spec["containers"][1]["args"] == ["--node-rank=0"]  # another's flag


def test_a_worker_answers_nobody():
    spec = worker()["spec"]["template"]["spec"]
    assert "readinessGates" in leader_deployment()["spec"]["template"]["spec"]
    assert "readinessGates" not in spec
    assert not {"ports", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"} & set(
        container(worker())
    )


def test_a_worker_belongs_to_the_pod_and_is_selected_by_it_and_its_rank():
    first, second = worker(1), worker(2)
    assert kinds.name_of(first) != kinds.name_of(second)
    for body in (first, second):
        selected = body["spec"]["selector"]["matchLabels"]
        assert selected.items() <= body["spec"]["template"]["metadata"]["labels"].items()
        assert selected[labels.LEADER_LABEL] == "u-1"
        assert kinds.controller_uid(body) == "u-1"
        assert "blockOwnerDeletion" not in body["metadata"]["ownerReferences"][0]
    assert first["spec"]["selector"] != second["spec"]["selector"]


def test_the_leader_s_template_is_not_changed_by_its_workers():
    before = leader_deployment()
    engine = leader_deployment()
    pod = {"metadata": {"name": "a-pod", "uid": "u-1"}, "status": {"podIP": "10.1.2.3"}}
    worker_deployment(engine, pod, 1)
    assert engine == before


def test_the_longest_name_still_fits():
    objects = desired_objects(make_deployment(SPEC, name="a" * 63), with_images())
    (engine,) = (each for each in objects if each["kind"] == "Deployment")
    pod = {"metadata": {"name": "p" * 63, "uid": "u" * 36}, "status": {"podIP": "10.1.2.3"}}
    # A ReplicaSet adds eleven characters; beyond 63 Kubernetes cuts pods' names.
    assert len(kinds.name_of(worker_deployment(engine, pod, 63))) <= 80


def test_the_pods_of_one_group_reach_each_other_and_those_of_no_other_one():
    one, other = ({"metadata": {"name": f"pod-{n}", "uid": f"u-{n}"}} for n in range(2))
    policy = group_policy(leader_deployment(), one)
    assert kinds.name_of(policy) != kinds.name_of(group_policy(leader_deployment(), other))
    assert kinds.controller_uid(policy) == "u-0"
    selected = policy["spec"]["podSelector"]["matchLabels"]
    workers = worker_deployment(leader_deployment(), {**one, "status": {"podIP": "10.1.2.3"}}, 1)
    assert selected.items() <= workers["spec"]["template"]["metadata"]["labels"].items()
    template = leader_deployment()["spec"]["template"]["metadata"]["labels"]
    assert selected.items() <= (template | leader_labels(one)).items()
    assert not selected.items() <= (template | leader_labels(other)).items()
    port = [{"port": LEADER_PORT, "protocol": "TCP"}]
    same = [{"podSelector": {"matchLabels": selected}}]
    assert policy["spec"]["ingress"] == [{"from": same, "ports": port}]
    assert policy["spec"]["egress"] == [{"to": same, "ports": port}]
    own = next(
        each for each in desired_objects(make_deployment(SPEC), with_images())
        if each["kind"] == "NetworkPolicy"
    )  # fmt: skip
    assert str(LEADER_PORT) not in json.dumps(own)  # nobody else reaches it


def queued(labels_: dict[str, str]) -> dict[str, Any]:
    spec = {**SPEC, "podTemplate": {"metadata": {"labels": labels_}}}
    objects = desired_objects(make_deployment(spec), with_images())
    (engine,) = (each for each in objects if each["kind"] == "Deployment")
    pod = {"metadata": {"name": "a-pod", "uid": "u-1"}, "status": {"podIP": "10.1.2.3"}}
    metadata: dict[str, Any] = worker_deployment(engine, pod, 2)["spec"]["template"]["metadata"]
    return metadata


def test_the_workers_of_a_group_leave_a_queue_together():
    metadata = queued({"kueue.x-k8s.io/queue-name": "large"})
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "large"
    assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == "octavo-u-1"
    assert metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    # The template of the pod that serves has the queue alone: it is there before they are.
    assert "kueue.x-k8s.io/pod-group-name" not in leader_deployment()["spec"]["template"]
    assert "kueue" not in json.dumps(queued({}))


def test_all_pods_of_a_group_go_to_the_scheduler_and_queue_of_the_template():
    template = {
        "metadata": {"annotations": {"scheduling.volcano.sh/queue-name": "large"},
                     "labels": {"kai.scheduler/queue": "large"}},
        "spec": {"schedulerName": "volcano", "priorityClassName": "batch"},
    }  # fmt: skip
    objects = desired_objects(make_deployment({**SPEC, "podTemplate": template}), with_images())
    (engine,) = (each for each in objects if each["kind"] == "Deployment")
    pod = {"metadata": {"name": "a-pod", "uid": "u-1"}, "status": {"podIP": "10.1.2.3"}}
    for body in (engine, worker_deployment(engine, pod, 1)):
        made = body["spec"]["template"]
        assert made["spec"]["schedulerName"] == "volcano"
        assert made["spec"]["priorityClassName"] == "batch"
        assert made["metadata"]["annotations"]["scheduling.volcano.sh/queue-name"] == "large"
        assert made["metadata"]["labels"]["kai.scheduler/queue"] == "large"


def kinds_of(kind: str, **spec: Any) -> list[dict[str, Any]]:
    settings = replace(with_images(), capabilities=frozenset({POD_MONITOR, SCALED_OBJECT}))
    return [
        each for each in desired_objects(make_deployment({**SPEC, **spec}), settings)
        if each["kind"] == kind
    ]  # fmt: skip


def test_what_scrapes_counts_and_sends_requests_selects_the_pods_that_serve_alone():
    (monitor,) = kinds_of("PodMonitor")
    services = kinds_of("Service")
    selectors = [monitor["spec"]["selector"]["matchLabels"]]
    selectors += [each["spec"]["selector"] for each in services]
    assert len(selectors) == 3
    own = worker()["spec"]["template"]["metadata"]["labels"]
    leader = leader_deployment()["spec"]["template"]["metadata"]["labels"]
    for selector in selectors:
        assert selector.items() <= leader.items()
        assert not selector.items() <= own.items()


def test_autoscalers_count_groups():
    for provider, kind in (("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        scaling = {"provider": provider, "maxReplicas": 4, "targets": {"inFlight": 8}}
        if provider == "keda":
            scaling["prometheusURL"] = "http://prometheus:9090"
        (scaler,) = kinds_of(kind, autoscaling=scaling)
        # It scales the LLMDeployment, whose `status.selector` finds those that serve.
        assert scaler["spec"]["scaleTargetRef"]["kind"] == "LLMDeployment"


def test_a_share_of_groups_that_may_be_away_is_no_share_of_their_pods():
    """Else all groups could lose a pod each."""
    for replicas, allowed, pods in ((4, "25%", 1), (8, "25%", 2), (2, "50%", 1), (2, 2, 2)):
        rollout = {"maxUnavailable": allowed}
        (budget,) = kinds_of("PodDisruptionBudget", replicas=replicas, rollout=rollout)
        assert budget["spec"]["maxUnavailable"] == pods
        assert budget["spec"]["selector"]["matchLabels"].items() <= (
            worker()["spec"]["template"]["metadata"]["labels"].items()
        )
    scaling = {"minReplicas": 4, "maxReplicas": 64}
    (budget,) = kinds_of(
        "PodDisruptionBudget", autoscaling=scaling, rollout={"maxUnavailable": "50%"}
    )
    assert budget["spec"]["maxUnavailable"] == 2
