"""What leaders of groups lack (workers, a policy, labels), and what is left of those that ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.protocol.kubernetes import REVISION_LABEL, WORKER_COMPONENT
from octavo_operator.decide.observed import component_of
from octavo_operator.desired.group import (
    address_of,
    group_policy,
    leader_labels,
    worker_deployment,
    worker_name,
)
from octavo_operator.objects import kinds, labels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Object


def missing_workers(observed: Observed) -> list[Object]:
    """Deployments to apply. One that exists is changed where its leader has moved only: pods that
    run keep the template they were made by, as leaders do."""
    return [
        worker_deployment(engine, leader, rank)
        for engine, leader in _groups(observed)
        if address_of(leader) and not leader["metadata"].get("deletionTimestamp")
        for rank in range(1, _group_size(leader))
        if not _is_there(worker_name(engine, leader, rank), leader, observed)
    ]


def group_policies(observed: Observed) -> list[Object]:
    """NetworkPolicies as they should be, of groups that drain too."""
    return [group_policy(engine, leader) for engine, leader in _groups(observed)]


def unlabelled_leaders(observed: Observed) -> list[tuple[Object, dict[str, str]]]:
    """By the labels that they lack, policies select them with their workers."""
    return [
        (leader, wanted)
        for _, leader in _groups(observed)
        if not (wanted := leader_labels(leader)).items() <= kinds.labels_of(leader).items()
    ]


def orphans(observed: Observed) -> list[Object]:
    """Of leaders that ended and whose pods are still there, or that were never seen to go."""
    leaders = {kinds.uid_of(pod) for pod in observed.engine_pods}
    return [
        body
        for (kind, _), body in observed.children.items()
        if kind in (kinds.DEPLOYMENT, kinds.NETWORK_POLICY)
        and kinds.labels_of(body).get(labels.LEADER_LABEL, "") not in ("", *leaders)
        and not body["metadata"].get("deletionTimestamp")
    ]


def workers_by_leader(observed: Observed) -> dict[str, list[Object]]:
    """The worker pods, by the UID of the pod that they compute for."""
    found: dict[str, list[Object]] = {}
    for pod in observed.pods:
        if component_of(pod) == WORKER_COMPONENT:
            found.setdefault(kinds.labels_of(pod).get(labels.LEADER_LABEL, ""), []).append(pod)
    return found


def _groups(observed: Observed) -> Iterator[tuple[Object, Object]]:
    """The Deployment of its revision, and the leader, of each group."""
    for leader in observed.engine_pods:
        engine = observed.engines.get(kinds.labels_of(leader)[REVISION_LABEL])
        if engine is not None and _group_size(leader) > 1:
            yield engine, leader


def _group_size(leader: Object) -> int:
    size = kinds.annotations_of(leader).get(labels.GROUP_SIZE_ANNOTATION, "")
    return int(size) if size.isdecimal() else 1


def _is_there(name: str, leader: Object, observed: Observed) -> bool:
    found = observed.children.get((kinds.DEPLOYMENT, name))
    if found is None:
        return False
    return kinds.annotations_of(found)[labels.ADDRESS_ANNOTATION] == address_of(leader)
