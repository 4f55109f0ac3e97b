"""The pods of a group: what a worker has of its leader, and what the engine makes of both."""

from __future__ import annotations

from typing import Any

from octavo_operator.desired import desired_objects
from octavo_operator.desired.group import worker_deployment
from octavo_operator.objects import kinds, labels
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
