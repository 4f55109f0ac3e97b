"""The workers that leaders of groups lack, and those whose leader will not serve again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.protocol.kubernetes import REVISION_LABEL, WORKER_COMPONENT
from octavo_operator.decide.observed import component_of
from octavo_operator.desired.group import address_of, worker_deployment, worker_name
from octavo_operator.objects import kinds, labels

if TYPE_CHECKING:
    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Object


def missing_workers(observed: Observed) -> list[Object]:
    """Deployments to apply. One that exists is changed where its leader has moved only: pods that
    run keep the template they were made by, as leaders do."""
    return [
        worker_deployment(engine, leader, rank)
        for leader in observed.engine_pods
        if address_of(leader) and not leader["metadata"].get("deletionTimestamp")
        if (engine := observed.engines.get(kinds.labels_of(leader)[REVISION_LABEL])) is not None
        for rank in range(1, _group_size(leader))
        if not _is_there(worker_name(engine, leader, rank), leader, observed)
    ]


def orphaned_workers(observed: Observed) -> list[Object]:
    """Of leaders that ended and whose pods are still there, or that were never seen to go."""
    leaders = {kinds.uid_of(pod) for pod in observed.engine_pods}
    return [
        body
        for (kind, _), body in observed.children.items()
        if kind == kinds.DEPLOYMENT
        and component_of(body) == WORKER_COMPONENT
        and kinds.labels_of(body).get(labels.LEADER_LABEL) not in leaders
        and not body["metadata"].get("deletionTimestamp")
    ]


def _group_size(leader: Object) -> int:
    size = kinds.annotations_of(leader).get(labels.GROUP_SIZE_ANNOTATION, "")
    return int(size) if size.isdecimal() else 1


def _is_there(name: str, leader: Object, observed: Observed) -> bool:
    found = observed.children.get((kinds.DEPLOYMENT, name))
    if found is None:
        return False
    return kinds.annotations_of(found)[labels.ADDRESS_ANNOTATION] == address_of(leader)
