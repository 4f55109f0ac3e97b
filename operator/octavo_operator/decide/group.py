"""The workers that leaders of groups lack, and those whose leader will not serve again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.protocol.kubernetes import REVISION_LABEL, WORKER_COMPONENT
from octavo_operator.decide.observed import component_of
from octavo_operator.desired.group import address_of, worker_deployment
from octavo_operator.objects import kinds, labels

if TYPE_CHECKING:
    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Object


def missing_workers(observed: Observed) -> list[Object]:
    """Deployments to apply. One that exists is changed where its leader has moved only: pods that
    run keep the template they were made by, as leaders do."""
    return [
        body
        for leader in observed.engine_pods
        if address_of(leader) and not leader["metadata"].get("deletionTimestamp")
        for body in _workers(leader, observed)
        if not _is_there(body, observed)
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


def _workers(leader: Object, observed: Observed) -> list[Object]:
    size = kinds.annotations_of(leader).get(labels.GROUP_SIZE_ANNOTATION, "1")
    engine = observed.engines.get(kinds.labels_of(leader)[REVISION_LABEL])
    if engine is None or not size.isdecimal():
        return []
    return [worker_deployment(engine, leader, rank) for rank in range(1, int(size))]


def _is_there(body: Object, observed: Observed) -> bool:
    found = observed.children.get((kinds.DEPLOYMENT, kinds.name_of(body)))
    if found is None:
        return False
    there, wanted = (
        kinds.annotations_of(each)[labels.ADDRESS_ANNOTATION] for each in (found, body)
    )
    return there == wanted
