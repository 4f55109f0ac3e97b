"""The pods of one engine that is several: a leader, which serves, and a Deployment for each worker.

Beside them a NetworkPolicy: the pods of one group reach each other, and those of no other one.

A leader is an engine pod like any other, so that rollouts, canaries, scaling and routers know
nothing of groups: it is ready once all its workers are there. A worker is made from the template of
its leader's Deployment, whichever revision that is, and belongs to the leader: it goes when the
leader has gone, drained. See docs/adr/0024-groups-of-pods.md.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import LEADER_PORT
from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    DEPLOYMENT_LABEL,
    POD_IP_ENV,
    REVISION_LABEL,
    WORKER_COMPONENT,
)
from octavo_operator.desired.between_pods import own_address, secret_mount, secret_volume
from octavo_operator.objects import kinds, labels, names
from octavo_operator.spec.shared_secret import SECRET_KEY

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Kind, Object
    from octavo_operator.spec import LLMDeployment

_VOLUME = "group-secret"
_MOUNT = "/run/octavo/group"
_LEADER_RANK = "--node-rank=0"
_LEADER_ADDRESS = f"--master-addr=$({POD_IP_ENV})"
# A worker holds no request of its own: it ends at the signal.
_GRACE_S = 30
# Kueue: pods with a queue's label wait for quota, those of one group together. By the label alone;
# where there is no Kueue, it is one that nobody reads.
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_QUEUED_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
_QUEUED_SIZE_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
# What only a pod that serves has.
_OF_LEADERS = ("ports", "lifecycle", "startupProbe", "livenessProbe", "readinessProbe")


def arguments(deployment: LLMDeployment) -> list[str]:
    """Of `octavo serve` in a leader. Flags, not lines of its file: workers have the same file."""
    if deployment.group is None:
        return []
    return [
        f"--nnodes={deployment.group.size}",
        _LEADER_RANK,
        _LEADER_ADDRESS,
        f"--master-port={LEADER_PORT}",
        f"--node-key-file={_MOUNT}/{SECRET_KEY}",
    ]


def variables(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [] if deployment.group is None else [own_address()]


def ports(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [] if deployment.group is None else [{"name": "workers", "containerPort": LEADER_PORT}]


def volumes(deployment: LLMDeployment) -> list[dict[str, Any]]:
    if deployment.group is None:
        return []
    return [secret_volume(_VOLUME, deployment.group.secret)]


def mounts(deployment: LLMDeployment) -> list[dict[str, Any]]:
    return [] if deployment.group is None else [secret_mount(_VOLUME, _MOUNT)]


def pod_annotations(deployment: LLMDeployment) -> dict[str, str]:
    if deployment.group is None:
        return {}
    return {labels.GROUP_SIZE_ANNOTATION: str(deployment.group.size)}


def leader_labels(leader: Object) -> dict[str, str]:
    """What makes it one of its group. A Deployment gives all its pods the same labels, so that they
    are set on the pod once it is there."""
    return {labels.LEADER_LABEL: kinds.uid_of(leader), labels.RANK_LABEL: "0"}


def policy_name(engine: Object, leader: Object) -> str:
    owned = kinds.labels_of(engine)
    return names.group(owned[DEPLOYMENT_LABEL], owned[REVISION_LABEL], kinds.uid_of(leader))


def group_policy(engine: Object, leader: Object) -> Object:
    """Between the pods of one group, beside what the LLMDeployment's own policy allows."""
    owner = kinds.labels_of(engine)[DEPLOYMENT_LABEL]
    members = {DEPLOYMENT_LABEL: owner, labels.LEADER_LABEL: kinds.uid_of(leader)}
    selected = {"podSelector": {"matchLabels": members}}
    port = [{"port": LEADER_PORT, "protocol": "TCP"}]
    spec = {
        **selected,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [selected], "ports": port}],
        "egress": [{"to": [selected], "ports": port}],
    }
    head = _child(kinds.NETWORK_POLICY, policy_name(engine, leader), engine, leader)
    return {**head, "spec": spec}


def worker_name(engine: Object, leader: Object, rank: int) -> str:
    owned = kinds.labels_of(engine)
    uid = kinds.uid_of(leader)
    return names.worker_deployment(owned[DEPLOYMENT_LABEL], owned[REVISION_LABEL], uid, rank)


def worker_deployment(engine: Object, leader: Object, rank: int) -> Object:
    """`engine`: the Deployment of the leader's revision. The leader has an address."""
    owner = kinds.labels_of(engine)[DEPLOYMENT_LABEL]
    revision = kinds.labels_of(engine)[REVISION_LABEL]
    uid = kinds.uid_of(leader)
    own = {
        COMPONENT_LABEL: WORKER_COMPONENT,
        labels.LEADER_LABEL: uid,
        labels.RANK_LABEL: f"{rank}",
    }
    head = _child(kinds.DEPLOYMENT, worker_name(engine, leader, rank), engine, leader)
    head["metadata"]["labels"] |= {REVISION_LABEL: revision, **own}
    head["metadata"]["annotations"] = {labels.ADDRESS_ANNOTATION: address_of(leader)}
    spec = {
        "replicas": 1,
        "revisionHistoryLimit": 0,
        "selector": {"matchLabels": {DEPLOYMENT_LABEL: owner, **own}},
        # Two workers of one rank would be in each other's way.
        "strategy": {"type": "Recreate"},
        "template": _worker_template(engine["spec"]["template"], own, address_of(leader), rank),
    }
    return {**head, "spec": spec}


def _child(kind: Kind, name: str, engine: Object, leader: Object) -> Object:
    """The head of what goes with the leader."""
    uid = kinds.uid_of(leader)
    owner = {
        "apiVersion": kinds.POD.api_version,
        "kind": kinds.POD.name,
        "name": kinds.name_of(leader),
        "uid": uid,
        "controller": True,
    }
    own = {**labels.common(kinds.labels_of(engine)[DEPLOYMENT_LABEL]), labels.LEADER_LABEL: uid}
    metadata = {
        "name": name,
        "namespace": kinds.namespace_of(engine),
        "labels": own,
        # NOTE: a block on the leader's deletion would need a permission on pods' finalizers.
        "ownerReferences": [owner],
    }
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}


def address_of(leader: Object) -> str:
    """Where its workers reach it; "" until it has a place."""
    return str((leader.get("status") or {}).get("podIP") or "")


def _worker_template(template: Object, own: dict[str, str], address: str, rank: int) -> Object:
    template = copy.deepcopy(template)
    spec, meta = template["spec"], template["metadata"]
    meta["labels"] |= own
    size = meta["annotations"].pop(labels.GROUP_SIZE_ANNOTATION, "")
    if meta["labels"].get(_QUEUE_LABEL) and size.isdecimal():
        # All workers or none: half a group computes nothing, and keeps its place from another.
        meta["labels"][_QUEUED_GROUP_LABEL] = f"octavo-{own[labels.LEADER_LABEL]}"
        meta["annotations"][_QUEUED_SIZE_ANNOTATION] = f"{int(size) - 1}"
    spec.pop("readinessGates", None)
    spec["terminationGracePeriodSeconds"] = _GRACE_S
    for constraint in spec.get("topologySpreadConstraints", ()):
        selected = constraint.get("labelSelector", {}).get("matchLabels", {})
        if COMPONENT_LABEL in selected:
            selected[COMPONENT_LABEL] = WORKER_COMPONENT
    for container in spec["containers"]:
        if container["name"] != names.ENGINE_CONTAINER:
            continue
        for part in _OF_LEADERS:
            container.pop(part, None)
        changed = {
            _LEADER_RANK: f"--node-rank={rank}",
            _LEADER_ADDRESS: f"--master-addr={address}",
        }
        container["args"] = [changed.get(each, each) for each in container["args"]]
    return template
