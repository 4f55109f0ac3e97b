"""Deployments that have pods: what controllers and kubelets do, one explicit step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.protocol.kubernetes import DELETION_COST_ANNOTATION
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Object
    from tests.fakes.cluster import FakeCluster


class Workloads:
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def sync(self) -> None:
        """What the Deployment controller does at once: as many pods as requested; the unready
        leave first, then those of the lowest deletion cost."""
        owned: dict[str, list[Object]] = {}
        for pod in self._cluster.all(kinds.POD):
            for uid in kinds.owner_uids(pod):
                owned.setdefault(uid, []).append(pod)
        for deployment in self._cluster.all(kinds.DEPLOYMENT):
            place = kinds.namespace_of(deployment), kinds.name_of(deployment)
            if not self._cluster.has(kinds.DEPLOYMENT, *place):
                continue  # it went with the pod that it belonged to
            pods = owned.get(kinds.uid_of(deployment), [])
            wanted = int(deployment["spec"].get("replicas", 1))
            for _ in range(wanted - len(pods)):
                self._create(deployment)
            for pod in sorted(pods, key=_leaves_first)[: max(0, len(pods) - wanted)]:
                self._cluster.remove(kinds.POD, kinds.namespace_of(pod), kinds.name_of(pod))
            self._count(deployment, wanted)

    def pods(self, deployment: Object) -> list[Object]:
        uid = kinds.uid_of(deployment)
        return [pod for pod in self._cluster.all(kinds.POD) if uid in kinds.owner_uids(pod)]

    def make_ready(self, pod: Object) -> None:
        """The engine answers; the pod is Ready once its gates are open too."""
        self.set_condition(pod, "ContainersReady", "True")
        self.update_ready(pod)

    def make_all_ready(self) -> None:
        for pod in self._cluster.all(kinds.POD):
            self.make_ready(pod)

    def update_ready(self, pod: Object) -> None:
        """As the kubelet does whenever a condition has changed."""
        pod = self._cluster.one(kinds.POD, kinds.namespace_of(pod), kinds.name_of(pod))
        conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
        gates = [g["conditionType"] for g in pod["spec"].get("readinessGates", [])]
        is_ready = conditions.get("ContainersReady") == "True" and all(
            conditions.get(gate) == "True" for gate in gates
        )
        self.set_condition(pod, "Ready", "True" if is_ready else "False")

    def update_all(self) -> None:
        for pod in self._cluster.all(kinds.POD):
            self.update_ready(pod)

    def set_condition(self, pod: Object, name: str, value: str) -> None:
        pod = self._cluster.one(kinds.POD, kinds.namespace_of(pod), kinds.name_of(pod))
        conditions = pod["status"].get("conditions", [])
        if all(c["type"] != name for c in conditions):
            conditions.append({"type": name})
        for condition in conditions:
            if condition["type"] == name:
                condition["status"] = value
        self.set_status(pod, {"conditions": conditions})

    def set_status(self, pod: Object, status: Object) -> None:
        self._cluster.merge(
            kinds.POD, kinds.namespace_of(pod), kinds.name_of(pod), {"status": status}
        )

    def kill(self, pod: Object) -> None:
        """Its node is gone; the ReplicaSet replaces it at the next sync."""
        self._cluster.remove(kinds.POD, kinds.namespace_of(pod), kinds.name_of(pod))

    def _create(self, deployment: Object) -> None:
        template = deployment["spec"]["template"]
        # Unlike any before, also for another instance over the same cluster.
        name = f"{kinds.name_of(deployment)}-{len(self._cluster.events):05d}"
        self._cluster.put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "namespace": kinds.namespace_of(deployment),
                    "name": name,
                    "labels": template["metadata"]["labels"],
                    "annotations": dict(template["metadata"].get("annotations", {})),
                    "ownerReferences": [
                        {
                            "apiVersion": "apps/v1",
                            "kind": "ReplicaSet",
                            "name": kinds.name_of(deployment),
                            "uid": kinds.uid_of(deployment),
                            "controller": True,
                        }
                    ],
                },
                "spec": {"readinessGates": template["spec"].get("readinessGates", [])},
                "status": {"phase": "Running", "podIP": _address(name), "conditions": []},
            }
        )

    def _count(self, deployment: Object, num_pods: int) -> None:
        self._cluster.merge(
            kinds.DEPLOYMENT,
            kinds.namespace_of(deployment),
            kinds.name_of(deployment),
            {"status": {"replicas": num_pods, "observedGeneration": _generation(deployment)}},
        )


def _leaves_first(pod: Object) -> tuple[bool, int, str]:
    conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
    cost = int(kinds.annotations_of(pod).get(DELETION_COST_ANNOTATION, "0"))
    return conditions.get("Ready") == "True", cost, kinds.name_of(pod)


def _address(pod_name: str) -> str:
    number = int(pod_name[-5:])
    return f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"


def _generation(body: Object) -> int:
    return int(body["metadata"]["generation"])
