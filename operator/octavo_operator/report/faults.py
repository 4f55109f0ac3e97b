"""What is wrong, read from pods, Deployments, claims, warnings and refusals: one sentence each.

A row per symptom; each classifier looks at one object and returns the first fault it recognises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    ROUTABLE_CONDITION,
    WORKER_COMPONENT,
)
from octavo_operator.decide.observed import condition_of, waits_for_gate
from octavo_operator.objects import kinds, labels
from octavo_operator.objects.names import FETCH_CONTAINER
from octavo_operator.reasons import Reason, explain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Object

_SEVERITY = {reason: rank for rank, reason in enumerate(Reason)}


@dataclass(frozen=True, slots=True)
class Fault:
    reason: Reason
    fact: str
    subject: str = ""  # the object it was seen on
    uid: str = ""

    @property
    def message(self) -> str:
        return explain(self.reason, f"{self.subject}: {self.fact}" if self.subject else self.fact)


def find_faults(
    observed: Observed, warnings: Mapping[str, Sequence[Object]], *, has_routers: bool = True
) -> list[Fault]:
    """All faults, the most severe first, one per reason. `warnings`: events by the UID of what
    they are about, the newest first."""
    found: dict[Reason, Fault] = {}
    for fault in _all(observed, warnings, has_routers=has_routers):
        found.setdefault(fault.reason, fault)
    return sorted(found.values(), key=lambda fault: _SEVERITY[fault.reason])


def refusal(message: str, status: int | None = None) -> Reason:
    """Why the API server did not take an object; from its message, the only thing it gives."""
    text = message.lower()
    for pattern, reason in _REFUSALS:
        if re.search(pattern, text):
            return reason
    return Reason.OPERATOR_FORBIDDEN if status == 403 else Reason.OBJECT_REFUSED


_REFUSALS = (
    (r"exceeded quota|failed quota|status unknown for quota", Reason.QUOTA_EXCEEDED),
    (r"being terminated|namespace.* is terminating", Reason.NAMESPACE_TERMINATING),
    (r"violates podsecurity", Reason.POD_SECURITY_VIOLATED),
    (r"failed calling webhook|webhook.*(timeout|deadline|refused)", Reason.WEBHOOK_UNAVAILABLE),
    (r"webhook .*denied|denied the request|validatingadmissionpolicy", Reason.WEBHOOK_DENIED),
    (r"(minimum|maximum) .* usage per|max limit to request ratio", Reason.LIMIT_RANGE_VIOLATED),
    (r"service ?account .*not found|serviceaccount ", Reason.SERVICE_ACCOUNT_MISSING),
    (r"no priorityclass", Reason.PRIORITY_CLASS_MISSING),
    (r"runtimeclass", Reason.RUNTIME_CLASS_MISSING),
    (r"cannot (get|list|create|patch|update|delete|watch) resource", Reason.OPERATOR_FORBIDDEN),
)


def unexplained(observed: Observed) -> list[Object]:
    """Those that do not start for a reason that only events show."""
    claims = [
        body
        for (kind, _), body in observed.children.items()
        if kind == kinds.VOLUME_CLAIM and (body.get("status") or {}).get("phase") == "Pending"
    ]
    pods = [
        pod
        for pod in observed.pods
        if condition_of(pod, "PodScheduled") == "True"
        and condition_of(pod, "ContainersReady") != "True"
        and not pod["metadata"].get("deletionTimestamp")
        and not any(pod_faults(pod, has_routers=False))
    ]
    return claims + pods


def newest_first(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=_seen_at, reverse=True)


def _seen_at(event: Object) -> str:
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event["metadata"].get("creationTimestamp"),
    )
    return str(next((time for time in times if time), ""))


def _all(
    observed: Observed, warnings: Mapping[str, Sequence[Object]], *, has_routers: bool
) -> Iterator[Fault]:
    for (kind, name), body in observed.children.items():
        if kind == kinds.DEPLOYMENT:
            yield from deployment_faults(body, name)
        if kind == kinds.VOLUME_CLAIM:
            yield from claim_faults(body, name, warnings.get(kinds.uid_of(body), ()))
    for pod in observed.pods:
        yield from pod_faults(pod, warnings.get(kinds.uid_of(pod), ()), has_routers=has_routers)


def deployment_faults(body: Object, name: str) -> Iterator[Fault]:
    for condition in (body.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            message = str(condition.get("message", ""))
            reason = refusal(message)
            if reason is Reason.OPERATOR_FORBIDDEN:
                reason = Reason.OBJECT_REFUSED  # it was the ReplicaSet that was refused
            yield Fault(reason, message, f"Deployment {name}")


def claim_faults(body: Object, name: str, warnings: Iterable[Object]) -> Iterator[Fault]:
    phase = (body.get("status") or {}).get("phase")
    subject = f"PersistentVolumeClaim {name}"
    if phase == "Lost":
        yield Fault(Reason.VOLUME_LOST, "its volume does not exist any more", subject)
    if phase != "Pending":
        return
    for warning in warnings:
        message = str(warning.get("message", ""))
        is_class = "storageclass" in message.lower() and "not found" in message.lower()
        reason = Reason.VOLUME_CLASS_MISSING if is_class else Reason.VOLUME_PENDING
        yield Fault(reason, message, subject)
        return


def pod_faults(
    pod: Object, warnings: Sequence[Object] = (), *, has_routers: bool = True
) -> Iterator[Fault]:
    """At most one that stops the pod, and then what its warnings add."""
    subject, uid = f"pod {kinds.name_of(pod)}{_place(pod)}", kinds.uid_of(pod)
    if pod["metadata"].get("deletionTimestamp") and condition_of(pod, "DisruptionTarget") != "True":
        return  # it is being deleted by the operator itself
    for look in (_lost, _unscheduled, _containers):
        found = look(pod)
        if found is not None:
            reason, fact = found
            yield Fault(reason, fact, subject, uid)
            return
    if condition_of(pod, "Ready") == "True":
        return
    found = _warned(warnings)
    if found is not None:
        yield Fault(found[0], found[1], subject, uid)
    elif has_routers and waits_for_gate(pod):
        yield Fault(Reason.NOT_ROUTABLE, _gate_fact(pod), subject, uid)


def _place(pod: Object) -> str:
    """In its group, where it is a worker of one."""
    own = kinds.labels_of(pod)
    is_worker = own.get(COMPONENT_LABEL) == WORKER_COMPONENT
    return f", rank {own.get(labels.RANK_LABEL, '')} of its group" if is_worker else ""


Found = tuple[Reason, str]


def _lost(pod: Object) -> Found | None:
    status = pod.get("status") or {}
    reason, message = str(status.get("reason", "")), str(status.get("message", ""))
    for condition in status.get("conditions") or []:
        kind, cause = condition.get("type"), str(condition.get("reason", ""))
        if kind == "DisruptionTarget" and condition.get("status") == "True":
            text = str(condition.get("message") or cause)
            if cause == "PreemptionByScheduler":
                return Reason.POD_PREEMPTED, text
            if cause == "TerminationByKubelet":
                return Reason.POD_EVICTED, message or text
            if cause in ("DeletionByTaintManager", "DeletionByPodGC"):
                return Reason.NODE_LOST, text
    if reason == "Evicted":
        return Reason.POD_EVICTED, message or "evicted"
    if reason in ("NodeLost", "NodeShutdown", "Shutdown"):
        return Reason.NODE_LOST, message or reason
    if status.get("phase") == "Unknown":
        return Reason.NODE_LOST, message or "its node does not report"
    if status.get("phase") == "Failed" and (
        reason in ("UnexpectedAdmissionError", "NodeAffinity") or reason.startswith("OutOf")
    ):
        return Reason.NODE_REFUSED_POD, message or reason
    return None


def _unscheduled(pod: Object) -> Found | None:
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
            continue
        message = str(condition.get("message") or condition.get("reason") or "no node fits")
        text = message.lower()
        for pattern, reason in _PLACES:
            if re.search(pattern, text):
                return reason, message
        return Reason.UNSCHEDULABLE, message
    return None


_PLACES = (
    (r"scheduling gate", Reason.SCHEDULING_GATED),
    (r"unbound immediate persistentvolumeclaims|persistentvolumeclaim .*not found",
     Reason.VOLUME_PENDING),
    (r"insufficient \S*(gpu|/mig-|neuron|tpu|gaudi)", Reason.GPU_INSUFFICIENT),
    (r"insufficient (cpu|memory|ephemeral-storage|pods)|too many pods|didn't have enough",
     Reason.RESOURCES_INSUFFICIENT),
    (r"node affinity|node selector|untolerated taint|topology spread|anti-affinity|nodename",
     Reason.NO_MATCHING_NODE),
)  # fmt: skip


def _containers(pod: Object) -> Found | None:
    status = pod.get("status") or {}
    for place in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(place) or []:
            name = str(container.get("name", ""))
            found = _waiting(container) or _ended(name, container)
            if found is not None:
                return found
    return None


def _waiting(container: Object) -> Found | None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
    text = message.lower()
    image = str(container.get("image", ""))
    if reason in _PULLS:
        fact = f"{image}: {message or reason}"
        # Names of images and addresses of registries may be any of the words below.
        text = re.sub(r"\S*/\S*", "", text)
        if re.search(r"no match for platform|no matching manifest|exec format", text):
            return Reason.IMAGE_ARCHITECTURE, fact
        if re.search(r"unauthori[sz]ed|denied|authentication|403 forbidden|\b401\b", text):
            return Reason.IMAGE_UNAUTHORIZED, fact
        if reason == "ErrImageNeverPull" or re.search(
            r"not found|manifest unknown|does not exist|name unknown", text
        ):
            return Reason.IMAGE_NOT_FOUND, fact
        return Reason.IMAGE_PULL_FAILED, fact
    if reason == "CreateContainerConfigError":
        return _missing_reference(message) or (Reason.CONTAINER_CANNOT_START, message)
    if reason in ("CreateContainerError", "RunContainerError", "StartError"):
        if "exec format error" in text:
            return Reason.IMAGE_ARCHITECTURE, message
        return Reason.CONTAINER_CANNOT_START, message or reason
    return None


_PULLS = frozenset(
    ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
     "RegistryUnavailable", "ImageInspectError", "SignatureValidationFailed")
)  # fmt: skip


def _missing_reference(message: str) -> Found | None:
    text = message.lower()
    if re.search(r"couldn't find key|references non-existent (secret|config) key", text):
        return Reason.REFERENCE_KEY_MISSING, message
    # The kind stands before the name, which may have the other's word in it.
    if missing := re.search(r'\b(secret|configmap)s? "[^"]*" not found', text):
        is_secret = missing[1] == "secret"
        return Reason.SECRET_MISSING if is_secret else Reason.CONFIG_MAP_MISSING, message
    if re.search(r"runasnonroot|run as root|non-numeric user", text):
        return Reason.SECURITY_CONTEXT_REFUSED, message
    return None


def _ended(name: str, container: Object) -> Found | None:
    """The last end counts as long as the container is not running well again."""
    state = container.get("state") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if not ended or container.get("ready"):
        return None
    code, cause = int(ended.get("exitCode", 0)), str(ended.get("reason", ""))
    if code == 0 and cause != "OOMKilled":
        return None
    output = str(ended.get("message") or "").strip()
    if cause == "OOMKilled":
        return Reason.OUT_OF_MEMORY, f"container {name} was killed for exceeding its memory limit"
    if cause == "StartError" or cause == "ContainerCannotRun":
        is_format = "exec format error" in output.lower()
        return (
            Reason.IMAGE_ARCHITECTURE if is_format else Reason.CONTAINER_CANNOT_START,
            output or f"exit code {code}",
        )
    if name == FETCH_CONTAINER:
        return _fetch_failure(output, code)
    restarts = int(container.get("restartCount", 0))
    fact = f"exit code {code}" + (f" after {restarts} restarts" if restarts else "")
    if last := _last_line(output):
        fact += f": {last}"
    if code in _EXITS:
        return _EXITS[code], fact
    return Reason.CRASH_LOOP, fact


# The engine's own exit codes, and 128 + a signal.
_EXITS = {
    1: Reason.MODEL_UNUSABLE,
    2: Reason.ENGINE_SETTINGS_REFUSED,
    132: Reason.INSTRUCTION_SET,
}

# The fetch step ends with {"reason": …, "message": …} in its termination message: these words.
FETCH_REASONS = {
    reason.value: reason
    for reason in (
        Reason.MODEL_UNAUTHORIZED,
        Reason.MODEL_NOT_FOUND,
        Reason.MODEL_REVISION_NOT_FOUND,
        Reason.MODEL_DIGEST_MISMATCH,
        Reason.MODEL_DISK_FULL,
        Reason.MODEL_UNREACHABLE,
        Reason.MODEL_FETCH_FAILED,
    )
}


def _fetch_failure(output: str, code: int) -> Found:
    try:  # the log's last line, where the step could not write its message
        failure = json.loads(_last_line(output))
    except (ValueError, RecursionError):
        failure = None
    if not isinstance(failure, dict):
        return Reason.MODEL_FETCH_FAILED, _last_line(output) or f"the fetch step ended with {code}"
    reason = FETCH_REASONS.get(str(failure.get("reason", "")), Reason.MODEL_FETCH_FAILED)
    return reason, str(failure.get("message") or f"the fetch step ended with {code}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _warned(warnings: Sequence[Object]) -> Found | None:
    for warning in warnings:
        reason, message = str(warning.get("reason", "")), str(warning.get("message", ""))
        if reason in ("FailedMount", "FailedAttachVolume"):
            return _missing_reference(message) or (Reason.MOUNT_FAILED, message)
        if reason in ("FailedCreatePodSandBox", "NetworkNotReady"):
            return Reason.NETWORK_SETUP_FAILED, message
        if reason == "Unhealthy":
            for start, found in _PROBES:
                if message.startswith(start):
                    return found, message
    return None


_PROBES = (
    ("Startup", Reason.STARTUP_PROBE_FAILING),
    ("Liveness", Reason.LIVENESS_PROBE_FAILING),
    ("Readiness", Reason.READINESS_PROBE_FAILING),
)


def _gate_fact(pod: Object) -> str:
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == ROUTABLE_CONDITION and condition.get("message"):
            return str(condition["message"])
    return "ready, but not all routers know it yet"
