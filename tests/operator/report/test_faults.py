"""Each way to fail, as Kubernetes tells it, becomes one reason and one sentence with its fix."""

from __future__ import annotations

import json

import pytest

from octavo_engine.protocol.kubernetes import REVISION_LABEL
from octavo_operator.decide.observed import Observed
from octavo_operator.objects import kinds
from octavo_operator.reasons import ADVICE, Reason, explain
from octavo_operator.report.faults import find_faults, refusal, unexplained

GATES = [{"conditionType": "octavo.dev/Routable"}]


def make_pod(**status) -> kinds.Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "d", "uid": "u", "labels": {REVISION_LABEL: "r"}},
        "spec": {"readinessGates": GATES},
        "status": {"phase": "Pending", **status},
    }


def waiting(reason: str, message: str = "", *, name: str = "engine") -> kinds.Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return make_pod(containerStatuses=[{"name": name, "image": "img:1", "state": state}])


def ended(code: int, message: str = "", reason: str = "Error", restarts: int = 3) -> kinds.Object:
    last = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    status = {"name": "engine", "state": state, "lastState": last, "restartCount": restarts}
    return make_pod(containerStatuses=[status])


def fetching(message: str, code: int = 1) -> kinds.Object:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": message}}
    return make_pod(initContainerStatuses=[{"name": "fetch", "state": state}])


def unscheduled(message: str) -> kinds.Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return make_pod(conditions=[{**condition, "message": message}])


def disrupted(reason: str) -> kinds.Object:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}
    return make_pod(conditions=[condition])


def fetch_json(reason: str, message: str) -> kinds.Object:
    return fetching(json.dumps({"reason": reason, "message": message}))


R = Reason
PODS = [
    (unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), R.GPU_INSUFFICIENT),
    (unscheduled("3 Insufficient nvidia.com/mig-1g.10gb."), R.GPU_INSUFFICIENT),
    (unscheduled("0/1 nodes are available: 1 Insufficient memory."), R.RESOURCES_INSUFFICIENT),
    (unscheduled("0/2 nodes: 2 node(s) had untolerated taint {gpu: true}."), R.NO_MATCHING_NODE),
    (unscheduled("pod has unbound immediate PersistentVolumeClaims."), R.VOLUME_PENDING),
    (unscheduled("no nodes available to schedule pods"), R.UNSCHEDULABLE),
    (
        unscheduled("Scheduling is blocked due to non-empty scheduling gates"),
        R.SCHEDULING_GATED,
    ),
    (waiting("ImagePullBackOff", "manifest unknown: not found"), R.IMAGE_NOT_FOUND),
    (waiting("ErrImagePull", "pull access denied, authorization failed"), R.IMAGE_UNAUTHORIZED),
    (waiting("ErrImagePull", "unexpected status: 401"), R.IMAGE_UNAUTHORIZED),
    (
        waiting(
            "ErrImagePull",
            'rpc error: code = NotFound desc = failed to resolve reference "10.0.0.1:40187/'
            'authentication/denied:401": 10.0.0.1:40187/authentication/denied:401: not found',
        ),
        R.IMAGE_NOT_FOUND,
    ),
    (waiting("ErrImagePull", "no match for platform in manifest"), R.IMAGE_ARCHITECTURE),
    (waiting("ErrImagePull", "dial tcp: i/o timeout"), R.IMAGE_PULL_FAILED),
    (waiting("ErrImageNeverPull", "not present with pull policy of Never"), R.IMAGE_NOT_FOUND),
    (waiting("CreateContainerConfigError", 'secret "tok" not found'), R.SECRET_MISSING),
    (waiting("CreateContainerConfigError", 'configmap "c" not found'), R.CONFIG_MAP_MISSING),
    (waiting("CreateContainerConfigError", 'configmap "secret" not found'), R.CONFIG_MAP_MISSING),
    (
        waiting("CreateContainerConfigError", "couldn't find key t in Secret d/tok"),
        R.REFERENCE_KEY_MISSING,
    ),
    (
        waiting("CreateContainerConfigError", "container has runAsNonRoot and image runs as root"),
        R.SECURITY_CONTEXT_REFUSED,
    ),
    (waiting("RunContainerError", "exec: octavo: not in $PATH"), R.CONTAINER_CANNOT_START),
    (waiting("CreateContainerError", "exec format error"), R.IMAGE_ARCHITECTURE),
    (fetch_json("ModelUnauthorized", "401 from huggingface.co"), R.MODEL_UNAUTHORIZED),
    (fetch_json("ModelNotFound", "404: no such model"), R.MODEL_NOT_FOUND),
    (fetch_json("ModelRevisionNotFound", "no revision x"), R.MODEL_REVISION_NOT_FOUND),
    (fetch_json("ModelDigestMismatch", "sha256 differs"), R.MODEL_DIGEST_MISMATCH),
    (fetch_json("ModelDiskFull", "needs 16 GB, has 10 GB"), R.MODEL_DISK_FULL),
    (fetch_json("ModelUnreachable", "no such host"), R.MODEL_UNREACHABLE),
    (fetching("Traceback\nKeyError: 'x'"), R.MODEL_FETCH_FAILED),
    (fetching('[1, "not an object"]'), R.MODEL_FETCH_FAILED),
    (fetching("[" * 3000), R.MODEL_FETCH_FAILED),  # Python's reader stops at a depth
    (ended(137, reason="OOMKilled"), R.OUT_OF_MEMORY),
    (ended(2, "octavo: max-num-seqs must be at least 1"), R.ENGINE_SETTINGS_REFUSED),
    (ended(1, "octavo: config.json: unknown architecture"), R.MODEL_UNUSABLE),
    (ended(132), R.INSTRUCTION_SET),
    (ended(139, "Segmentation fault"), R.CRASH_LOOP),
    (make_pod(phase="Failed", reason="Evicted", message="low on memory"), R.POD_EVICTED),
    (
        make_pod(phase="Failed", reason="OutOfcpu", message="Node didn't have cpu"),
        R.NODE_REFUSED_POD,
    ),
    (make_pod(phase="Unknown"), R.NODE_LOST),
    (disrupted("PreemptionByScheduler"), R.POD_PREEMPTED),
    (disrupted("DeletionByTaintManager"), R.NODE_LOST),
    (disrupted("TerminationByKubelet"), R.POD_EVICTED),
    (make_pod(conditions=[{"type": "ContainersReady", "status": "True"}]), R.NOT_ROUTABLE),
]


@pytest.mark.parametrize(("pod", "reason"), PODS, ids=lambda value: str(value)[:24])
def test_a_pod_says_what_is_wrong(pod, reason):
    (fault,) = find_faults(Observed(pods=(pod,)), {})
    assert fault.reason is reason
    assert fault.message.startswith("pod p: ")
    assert fault.message.endswith(ADVICE[reason].fix)


WARNINGS = [
    ("FailedMount", 'MountVolume.SetUp failed: secret "tok" not found', R.SECRET_MISSING),
    (
        "FailedMount",
        'MountVolume.SetUp failed for volume "a-secret" : configmap "c" not found',
        R.CONFIG_MAP_MISSING,
    ),
    ("FailedMount", "timed out waiting for the condition", R.MOUNT_FAILED),
    ("FailedAttachVolume", "Multi-Attach error for volume", R.MOUNT_FAILED),
    ("FailedCreatePodSandBox", "cni plugin not initialized", R.NETWORK_SETUP_FAILED),
    ("Unhealthy", "Startup probe failed: connection refused", R.STARTUP_PROBE_FAILING),
    ("Unhealthy", "Liveness probe failed: 503", R.LIVENESS_PROBE_FAILING),
    ("Unhealthy", "Readiness probe failed: 503", R.READINESS_PROBE_FAILING),
]


@pytest.mark.parametrize(("reason", "message", "expected"), WARNINGS)
def test_where_a_pod_is_silent_its_warnings_speak(reason, message, expected):
    pod = make_pod(conditions=[{"type": "PodScheduled", "status": "True"}])
    assert unexplained(Observed(pods=(pod,))) == [pod]
    event = {"metadata": {"name": "e"}, "reason": reason, "message": message, "type": "Warning"}
    (fault,) = find_faults(Observed(pods=(pod,)), {"u": [event]})
    assert fault.reason is expected


REFUSALS = [
    ('pods "x" is forbidden: exceeded quota: q, requested: cpu=4', R.QUOTA_EXCEEDED),
    ("failed quota: q: must specify limits.cpu", R.QUOTA_EXCEEDED),
    ("forbidden: maximum cpu usage per Container is 2, but limit is 4", R.LIMIT_RANGE_VIOLATED),
    ("forbidden: minimum memory usage per Pod is 1Gi", R.LIMIT_RANGE_VIOLATED),
    ('admission webhook "v.x" denied the request: no latest tags', R.WEBHOOK_DENIED),
    ('failed calling webhook "v.x": connection refused', R.WEBHOOK_UNAVAILABLE),
    ('violates PodSecurity "restricted:latest": hostPath volumes', R.POD_SECURITY_VIOLATED),
    ('error looking up service account d/s: serviceaccount "s" not found',
     R.SERVICE_ACCOUNT_MISSING),
    ("no PriorityClass with name high was found", R.PRIORITY_CLASS_MISSING),
    ('pod rejected: RuntimeClass "nvidia" not found', R.RUNTIME_CLASS_MISSING),
    ("unable to create new content in namespace d because it is being terminated",
     R.NAMESPACE_TERMINATING),
    ('Deployment.apps "x" is invalid: spec.template.spec.x', R.OBJECT_REFUSED),
]  # fmt: skip


@pytest.mark.parametrize(("message", "reason"), REFUSALS)
def test_a_refusal_is_recognised_on_a_deployment_and_on_our_own_write(message, reason):
    assert refusal(message, 422) is reason
    condition = {"type": "ReplicaFailure", "status": "True", "message": message}
    body = {"metadata": {"name": "d", "uid": "u"}, "status": {"conditions": [condition]}}
    (fault,) = find_faults(Observed({(kinds.DEPLOYMENT, "d"): body}), {})
    assert fault.reason is reason


def test_a_right_that_is_missing_is_the_operators():
    message = 'pods is forbidden: User "x" cannot patch resource "pods" in API group ""'
    assert refusal(message, 403) is R.OPERATOR_FORBIDDEN


@pytest.mark.parametrize(
    ("phase", "message", "reason"),
    [
        ("Lost", "", R.VOLUME_LOST),
        ("Pending", 'storageclass.storage.k8s.io "fast" not found', R.VOLUME_CLASS_MISSING),
        ("Pending", "no persistent volumes available", R.VOLUME_PENDING),
    ],
)
def test_a_claim_without_a_volume(phase, message, reason):
    claim = {"metadata": {"name": "c", "uid": "u"}, "status": {"phase": phase}}
    event = {"metadata": {"name": "e"}, "reason": "ProvisioningFailed", "message": message}
    observed = Observed({(kinds.VOLUME_CLAIM, "c"): claim})
    (fault,) = find_faults(observed, {"u": [event]})
    assert fault.reason is reason


def test_the_worst_comes_first_and_each_reason_once():
    pods = (waiting("ErrImagePull", "timeout"), ended(139), ended(139), unscheduled("no node"))
    faults = find_faults(Observed(pods=pods), {})
    assert [fault.reason for fault in faults] == [
        R.UNSCHEDULABLE, R.IMAGE_PULL_FAILED, R.CRASH_LOOP,
    ]  # fmt: skip


def test_a_pod_that_leaves_or_serves_has_no_fault():
    leaving = ended(137)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    serving = make_pod(conditions=[{"type": "Ready", "status": "True"}])
    recovered = ended(139)
    recovered["status"]["containerStatuses"][0]["ready"] = True
    recovered["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    assert find_faults(Observed(pods=(leaving, serving, recovered)), {}) == []


def test_a_crash_is_told_with_its_last_words():
    (fault,) = find_faults(Observed(pods=(ended(139, "line one\nterminate called\n"),)), {})
    assert fault.fact == "exit code 139 after 3 restarts: terminate called"


@pytest.mark.parametrize("junk", [{}, {"status": None}, {"status": {"containerStatuses": [{}]}}])
def test_odd_pods_break_nothing(junk):
    pod = {**make_pod(), **junk}
    find_faults(Observed(pods=(pod,)), {})


def test_every_reason_has_its_row():
    assert set(ADVICE) == set(Reason)


def test_messages_are_sentences_that_fit():
    assert explain(R.OUT_OF_MEMORY, "a\n b.").startswith("a b. Raise spec.resources")
    assert len(explain(R.OUT_OF_MEMORY, "x" * 5000)) < 1000
