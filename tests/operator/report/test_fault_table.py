"""Faults, and how each reads on condition Ready: one row each, on a real API server.

Pods and their statuses are made by hand, as scheduler and kubelet would make them. All rows are
injected at once before a running operator; each must be told within ten seconds, by an Event too.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.reasons import ADVICE
from octavo_operator.reasons import Reason as R
from tests.fakes.apiserver import ApiError
from tests.fakes.live_operator import operator
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from octavo_operator.objects.kinds import Object
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster
WITHIN_S = 10.0
GATE = "octavo.dev/Routable"


# --- what a kubelet, scheduler or controller would write ------------------------------------------


def status(**fields: Any) -> Object:
    return {"status": fields}


def unscheduled(message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return status(phase="Pending", conditions=[{**condition, "message": message}])


def waiting(reason: str, message: str) -> Object:
    return _engine({"waiting": {"reason": reason, "message": message}})


def ended(code: int, message: str = "", reason: str = "Error") -> Object:
    last = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return _engine({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}, last)


def fetch_ended(reason: str, message: str) -> Object:
    said = json.dumps({"reason": reason, "message": message})
    container = {
        "name": "fetch", "image": "i", "imageID": "", "ready": False, "restartCount": 1,
        "state": {"terminated": {"exitCode": 10, "reason": "Error", "message": said}},
    }  # fmt: skip
    return status(phase="Pending", initContainerStatuses=[container])


def evicted(message: str) -> Object:
    return status(phase="Failed", reason="Evicted", message=message)


def warned(reason: str, message: str) -> Object:
    """Only an Event of the kubelet's tells."""
    return {
        **_engine({"running": {"startedAt": "2026-01-01T00:00:00Z"}}),
        "warning": (reason, message),
    }


def replica_failure(message: str) -> Object:
    """The ReplicaSet cannot make pods; the Deployment says so."""
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
    return {"deployment": {"conditions": [{**condition, "message": message}]}}


def disrupted(reason: str) -> Object:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return status(phase="Running", conditions=[{**condition, "message": "by the cluster"}])


def claim_pending(message: str) -> Object:
    return {"claim": ("Pending", "ProvisioningFailed", message)}


def claim_lost() -> Object:
    return {"claim": ("Lost", "ClaimLost", "Bound claim has lost its PersistentVolume")}


def _engine(state: Object, last: Object | None = None) -> Object:
    container = {
        "name": "engine", "image": "i", "imageID": "", "ready": False, "restartCount": 3,
        "state": state, "lastState": last or {},
    }  # fmt: skip
    scheduled = {"type": "PodScheduled", "status": "True"}
    return status(phase="Running", conditions=[scheduled], containerStatuses=[container])


HUB: Object = {"model": {"uri": "hf://org/model"}}
CLAIM: Object = {**HUB, "cache": {"kind": "PersistentVolumeClaim", "size": "10Gi"}}
KEDA: Object = {
    "autoscaling": {
        "maxReplicas": 2, "provider": "keda", "prometheusURL": "http://prometheus:9090"
    }
}  # fmt: skip

# name of the fault: what is injected, the reason on Ready, words of its message, and the spec
TABLE: dict[str, tuple[Object, R, str, Object]] = {
    "no-gpu": (unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
               R.GPU_INSUFFICIENT, "Add a node with GPUs", {}),
    "no-room": (unscheduled("0/3 nodes are available: 3 Insufficient memory."),
                R.RESOURCES_INSUFFICIENT, "lower spec.resources", {}),
    "no-node": (unscheduled("0/3 nodes are available: 3 node(s) had untolerated taint {a: b}."),
                R.NO_MATCHING_NODE, "tolerations", {}),
    "no-image": (waiting("ErrImagePull", "manifest unknown: not found"),
                 R.IMAGE_NOT_FOUND, "Correct spec.engine.image", {}),
    "no-pull-secret": (waiting("ImagePullBackOff", "pull access denied: unauthorized"),
                       R.IMAGE_UNAUTHORIZED, "imagePullSecrets", {}),
    "no-secret": (waiting("CreateContainerConfigError", 'secret "hub" not found'),
                  R.SECRET_MISSING, "Create the Secret", {}),
    "no-key": (waiting("CreateContainerConfigError", "couldn't find key x in Secret ns/hub"),
               R.REFERENCE_KEY_MISSING, "Add the key", {}),
    "root-image": (waiting("CreateContainerConfigError",
                           "container has runAsNonRoot and image will run as root"),
                   R.SECURITY_CONTEXT_REFUSED, "non-root", {}),
    "crash-loop": (ended(139, "Segmentation fault"), R.CRASH_LOOP, "logs --previous", {}),
    "out-of-memory": (ended(137, reason="OOMKilled"),
                      R.OUT_OF_MEMORY, "Raise spec.resources.limits.memory", {}),
    "bad-flag": (ended(2, "octavo: max-num-seqs must be at least 1"),
                 R.ENGINE_SETTINGS_REFUSED, "max-num-seqs must be at least 1", {}),
    "bad-model": (ended(1, "octavo: config.json: unknown architecture X"),
                  R.MODEL_UNUSABLE, "unknown architecture X", {}),
    "old-processor": (ended(132), R.INSTRUCTION_SET, "OCTAVO_CPU_ISA", {}),
    "wrong-token": (fetch_ended("ModelUnauthorized", "org/model answers 401"),
                    R.MODEL_UNAUTHORIZED, "spec.model.secretRef", HUB),
    "no-model": (fetch_ended("ModelNotFound", "org/model is not on the hub"),
                 R.MODEL_NOT_FOUND, "Correct spec.model.uri", HUB),
    "no-revision": (fetch_ended("ModelRevisionNotFound", "org/model has no revision v9"),
                    R.MODEL_REVISION_NOT_FOUND, "has no revision v9", HUB),
    "wrong-digest": (fetch_ended("ModelDigestMismatch", "sha256:1 is not sha256:2"),
                     R.MODEL_DIGEST_MISMATCH, "Correct the digest", HUB),
    "full-disk": (fetch_ended("ModelDiskFull", "16 GiB needed, 10 GiB left"),
                  R.MODEL_DISK_FULL, "Raise spec.cache.size", HUB),
    "no-way": (fetch_ended("ModelUnreachable", "name not known"),
               R.MODEL_UNREACHABLE, "NetworkPolicy", HUB),
    "probe": (warned("Unhealthy", "Startup probe failed: connection refused"),
              R.STARTUP_PROBE_FAILING, "connection refused", {}),
    "hanging": (warned("Unhealthy", "Liveness probe failed: 503"),
                R.LIVENESS_PROBE_FAILING, "previous log", {}),
    "no-mount": (warned("FailedMount", "MountVolume.SetUp failed for volume x"),
                 R.MOUNT_FAILED, "volume x", {}),
    "evicted": (evicted("The node was low on resource: memory."),
                R.POD_EVICTED, "low on resource: memory", {}),
    "quota": (replica_failure('pods "x" is forbidden: exceeded quota: gpus, requested: 1'),
              R.QUOTA_EXCEEDED, "Raise the quota", {}),
    "webhook": (replica_failure('admission webhook "v.example" denied the request: no'),
                R.WEBHOOK_DENIED, "v.example", {}),
    "pod-security": (replica_failure('pods "x" is forbidden: violates PodSecurity "restricted"'),
                     R.POD_SECURITY_VIOLATED, "restricted", {}),
    "no-class": (claim_pending('storageclass.storage.k8s.io "fast" not found'),
                 R.VOLUME_CLASS_MISSING, "spec.cache.storageClassName", CLAIM),
    "no-binding": (unscheduled("pod has unbound immediate PersistentVolumeClaims."),
                   R.VOLUME_PENDING, "its StorageClass and its size", {}),
    "lost-volume": (claim_lost(), R.VOLUME_LOST, "fetched anew", CLAIM),
    "unscheduled": (unscheduled("no nodes available to schedule pods"),
                    R.UNSCHEDULABLE, "no nodes available", {}),
    "queued": (unscheduled("Scheduling is blocked due to non-empty scheduling gates"),
               R.SCHEDULING_GATED, "kubectl get workloads", {}),
    "no-platform": (waiting("ErrImagePull", "no match for platform in manifest"),
                    R.IMAGE_ARCHITECTURE, "kubernetes.io/arch", {}),
    "no-registry": (waiting("ErrImagePull", "dial tcp 10.0.0.1:443: i/o timeout"),
                    R.IMAGE_PULL_FAILED, "i/o timeout", {}),
    "no-config": (waiting("CreateContainerConfigError", 'configmap "c" not found'),
                  R.CONFIG_MAP_MISSING, 'configmap "c" not found', {}),
    "no-command": (waiting("RunContainerError", "exec: octavo: not in $PATH"),
                   R.CONTAINER_CANNOT_START, "not in $PATH", {}),
    "no-network": (warned("FailedCreatePodSandBox", "cni plugin not initialized"),
                   R.NETWORK_SETUP_FAILED, "network plug-in", {}),
    "broken-fetch": (fetch_ended("Surprise", "the stars stood badly"),
                     R.MODEL_FETCH_FAILED, "is retried", HUB),
    "full-node": (status(phase="Failed", reason="OutOfcpu", message="Node didn't have cpu"),
                  R.NODE_REFUSED_POD, "didn't have cpu", {}),
    "preempted": (disrupted("PreemptionByScheduler"), R.POD_PREEMPTED, "priorityClassName", {}),
    "lost-node": (disrupted("DeletionByTaintManager"), R.NODE_LOST, "remove the node", {}),
    "limit-range": (replica_failure('pods "x" is forbidden: maximum cpu usage per Container is 2'),
                    R.LIMIT_RANGE_VIOLATED, "within the LimitRange", {}),
    "deaf-webhook": (replica_failure('failed calling webhook "v.x": connection refused'),
                     R.WEBHOOK_UNAVAILABLE, "Repair or remove that webhook", {}),
    "no-account": (replica_failure('error looking up service account d/s: serviceaccount "s" '
                                   "not found"),
                   R.SERVICE_ACCOUNT_MISSING, "serviceAccountName", {}),
    "no-priority": (replica_failure("no PriorityClass with name high was found"),
                    R.PRIORITY_CLASS_MISSING, "priorityClassName", {}),
    "no-runtime": (replica_failure('pod rejected: RuntimeClass "nvidia" not found'),
                   R.RUNTIME_CLASS_MISSING, "runtimeClassName", {}),
    "unsupported": ({}, R.UNSUPPORTED, "keda needs KEDA in the cluster", KEDA),
}  # fmt: skip


# --- all of them before one operator --------------------------------------------------------------


@dataclass
class Reported:
    ready: tuple[str, str, str] = ("", "", "")  # status, reason, message
    event: str = ""
    after_s: float = float("inf")


@dataclass
class Rows:
    server: ApiServer
    namespace: str
    reported: dict[str, Reported] = field(default_factory=dict)

    def run(self, name: str) -> None:
        """Injects one fault, and waits until it is told."""
        injected, reason, _, spec = TABLE[name]
        body = self.server.create(make_deployment(name, self.namespace, **spec))
        began_at = time.monotonic()
        if injected:
            self._inject(name, injected)
            began_at = time.monotonic()
        reported = self.reported[name] = Reported()
        while time.monotonic() - began_at < WITHIN_S + 5.0:
            reported.ready = self._ready(body)
            reported.event = self._event(body, reason)
            if reported.ready[1] == reason and reported.event:
                reported.after_s = time.monotonic() - began_at
                return
            time.sleep(0.2)

    def _inject(self, name: str, injected: Object) -> None:
        deployment = self._child("apps/v1", "Deployment", name)
        if "deployment" in injected:
            change = {"status": injected["deployment"]}
            self.server.patch(deployment, change, subresource="status")
            return
        if "claim" in injected:
            claim = self._child("v1", "PersistentVolumeClaim", name)
            phase, reason, message = injected["claim"]
            self.server.patch(claim, {"status": {"phase": phase}}, subresource="status")
            self._warn(claim, reason, message)
            return
        template = deployment["spec"]["template"]
        pod = self.server.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-0",
                    "namespace": self.namespace,
                    "labels": template["metadata"]["labels"],
                },
                "spec": {
                    "readinessGates": [{"conditionType": GATE}],
                    "containers": [{"name": "engine", "image": "i"}],
                },
            }
        )
        if "warning" in injected:
            self._warn(pod, *injected["warning"])
        self.server.patch(pod, {"status": injected["status"]}, subresource="status")

    def _warn(self, about: Object, reason: str, message: str) -> None:
        meta = about["metadata"]
        involved = {key: meta[key] for key in ("name", "namespace", "uid")}
        self.server.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{meta['name']}.1", "namespace": self.namespace},
                "involvedObject": {"kind": about["kind"], "apiVersion": "v1", **involved},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "lastTimestamp": "2026-01-01T00:00:00Z",
            }
        )

    def _child(self, api_version: str, kind: str, name: str) -> Object:
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            for body in self.server.list(api_version, kind, self.namespace):
                if body["metadata"]["labels"].get("octavo.dev/deployment") == name:
                    return {"apiVersion": api_version, "kind": kind, **body}
            time.sleep(0.2)
        raise TimeoutError(f"{kind} of {name}")

    def _ready(self, body: Object) -> tuple[str, str, str]:
        for found in self.server.get(body).get("status", {}).get("conditions", []):
            if found["type"] == "Ready":
                return found["status"], found["reason"], found["message"]
        return "", "", ""

    def _event(self, body: Object, reason: R) -> str:
        path = f"/api/v1/namespaces/{self.namespace}/events"
        fields = f"involvedObject.uid={body['metadata']['uid']},reason={reason.value}"
        try:
            items = self.server.request("GET", path, fieldSelector=fields)["items"]
        except ApiError:
            return ""
        return str(items[0]["message"]) if items else ""


@pytest.fixture(scope="module")
def reported(apiserver: ApiServer) -> Iterator[Mapping[str, Reported]]:
    """What every row came to."""
    namespace = apiserver.make_namespace()
    rows = Rows(apiserver, namespace)
    with _running(apiserver, namespace), ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(rows.run, name) for name in TABLE]:
            done.result()
        yield rows.reported


class _running:  # reads as a verb
    """An operator in a thread, for tests that are not asynchronous."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._story = lambda: operator(server, namespace, lease=None)
        self._loop = asyncio.new_event_loop()
        self._stop: Callable[[], object] = lambda: None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        async def main() -> None:
            stop = asyncio.Event()
            self._stop = lambda: self._loop.call_soon_threadsafe(stop.set)
            async with self._story():
                self._started.set()
                await stop.wait()

        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(main())

    def __enter__(self) -> None:
        self._thread.start()
        assert self._started.wait(30)

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join(20)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", TABLE)
def test_each_fault_is_on_ready_and_in_an_event_within_ten_seconds(reported, name):
    _, reason, words, _ = TABLE[name]
    found = reported[name]
    assert found.ready[:2] == ("False", reason)
    assert words in found.ready[2]
    assert words in found.event
    assert found.after_s <= WITHIN_S


ELSEWHERE = {
    # What a spec, another object or the API server itself is needed for, on a real one too:
    R.SPEC_INVALID, R.UNSUPPORTED_VERSION,  # spec/test_deployment, crd/test_rules
    R.NAME_CONFLICT, R.SERVED_NAME_CONFLICT,  # test_other_writers
    R.OPERATOR_FORBIDDEN, R.OBJECT_REFUSED,  # test_api_refusals
    R.NAMESPACE_TERMINATING,  # test_faults: nothing can be told in it
    # What takes longer than ten seconds by its nature: it must have lasted.
    R.READINESS_PROBE_FAILING, R.NOT_ROUTABLE, R.PROGRESS_DEADLINE_EXCEEDED,  # test_status
    R.CANARY_REJECTED,  # test_canary
    R.ADAPTER_ROLLED_BACK,  # decide/test_adapter_trials
    # test_adapters
    R.ADAPTER_NAME_CONFLICT, R.DEPLOYMENT_NOT_FOUND, R.LORA_DISABLED, R.ADAPTER_NOT_LOADED,
}  # fmt: skip


def test_every_reason_for_a_fault_has_a_row_or_a_test_of_its_own():
    faults = {reason for reason in R if ADVICE[reason].fix != "nothing"}
    normal = set(list(R)[list(R).index(R.ACCEPTED) :])
    reported = {reason for _, reason, _, _ in TABLE.values()}
    assert reported & ELSEWHERE == set()
    assert reported | ELSEWHERE == faults - normal
