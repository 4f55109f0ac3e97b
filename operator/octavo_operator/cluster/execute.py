"""Executes a plan in its order; what each write returns goes into the cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_engine.protocol.kubernetes import (
    DELETION_COST_ANNOTATION,
    REVISION_LABEL,
    ROUTABLE_CONDITION,
)
from octavo_operator.decide.observed import component_of
from octavo_operator.decide.plan import FINGERPRINT_ANNOTATION, owner_text, stamp
from octavo_operator.errors import ApiRefused, Conflict, NameConflict, NotFound
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.decide.plan import ReconcilePlan, ScaleOrder
    from octavo_operator.decide.readiness_gate import ReadinessGate
    from octavo_operator.objects.kinds import Kind, Object

logger = logging.getLogger("octavo.operator.execute")
GOES_FIRST = "-100"  # below every pod that is not marked


class ObjectCache(Protocol):
    """Where what each write returned is kept."""

    def keep(self, kind: Kind, body: Object) -> object: ...

    def drop(self, kind: Kind, body: Object) -> object: ...


@dataclass(slots=True)
class Report:
    """What came of a plan."""

    refused: list[tuple[Object, ApiRefused]] = field(default_factory=list)
    conflicts: list[NameConflict] = field(default_factory=list)
    absent: list[Kind] = field(default_factory=list)  # optional kinds that are served no more
    settled: dict[tuple[Kind, str], tuple[str, str]] = field(default_factory=dict)


async def execute(
    cluster: Cluster, cache: ObjectCache, plan: ReconcilePlan, *, namespace: str,
    pods: Sequence[Object],
) -> Report:  # fmt: skip
    """Raises ClusterError where the rest must wait. An object that the API server refuses does not
    keep others from their place, but no engine starts without all that comes before it."""
    report = Report()
    for body in plan.apply:
        kind = kinds.kind_of(body)
        is_engine = REVISION_LABEL in kinds.labels_of(body) and kind == kinds.DEPLOYMENT
        if is_engine and (report.refused or report.conflicts):
            continue
        try:
            stored = await _apply(cluster, body)
        except ApiRefused as error:
            report.refused.append((body, error))
            continue
        except NameConflict as error:
            report.conflicts.append(error)
            continue
        except NotFound:
            if not kind.is_optional:
                raise
            report.absent.append(kind)  # the next resync will know; engines need not wait for it
            continue
        cache.keep(kind, stored)
        mark = kinds.annotations_of(body)[FINGERPRINT_ANNOTATION]
        report.settled[(kind, kinds.name_of(body))] = (mark, stamp(stored))
    for pod, wanted in plan.label:
        await _label(cluster, cache, pod, wanted, report)
    for order in plan.scale:
        await _mark_leaving(cluster, namespace, order, pods)
        cache.keep(kinds.DEPLOYMENT, await _scale(cluster, namespace, order))
    for body in plan.delete:
        await cluster.delete(
            kinds.kind_of(body),
            namespace,
            kinds.name_of(body),
            uid=kinds.uid_of(body),
            resource_version=str(body["metadata"]["resourceVersion"]),
        )
        # Without waiting for the watch: if it is silent, we would delete for ever. What stays for
        # its finalizers has changed, and comes back as an event.
        cache.drop(kinds.kind_of(body), body)
    for detail in plan.details:
        logger.info("%s", detail, extra={"namespace": namespace})
    return report


async def _apply(cluster: Cluster, body: Object) -> Object:
    """NOTE: server-side apply would take over a stranger's object of the same name, which our
    watches (by label) do not show: what is new is looked up first. What was found is what may be
    changed: an object that was changed or replaced since is decided on again."""
    kind, namespace, name = kinds.kind_of(body), kinds.namespace_of(body), kinds.name_of(body)
    found = await cluster.get(kind, namespace, name)
    if found is not None and kinds.controller_uid(found) != kinds.controller_uid(body):
        raise NameConflict(kind.name, name, owner_text(found))
    if found is not None:
        seen = {key: found["metadata"][key] for key in ("uid", "resourceVersion")}
        body = {**body, "metadata": {**body["metadata"], **seen}}
    return await cluster.apply(body)


async def _label(
    cluster: Cluster, cache: ObjectCache, pod: Object, wanted: dict[str, str], report: Report
) -> None:
    patch = {"metadata": {"uid": kinds.uid_of(pod), "labels": wanted}}
    try:
        stored = await cluster.patch(kinds.POD, kinds.namespace_of(pod), kinds.name_of(pod), patch)
    except (NotFound, Conflict):
        return  # it has left already
    except ApiRefused as error:
        report.refused.append(({**pod, "kind": kinds.POD.name}, error))
        return
    cache.keep(kinds.POD, stored)


async def _scale(cluster: Cluster, namespace: str, order: ScaleOrder) -> Object:
    patch = {
        "metadata": {"uid": order.uid, "resourceVersion": order.resource_version},
        "spec": {"replicas": order.replicas},
    }
    return await cluster.patch(kinds.DEPLOYMENT, namespace, order.name, patch)


async def _mark_leaving(
    cluster: Cluster, namespace: str, order: ScaleOrder, pods: Sequence[Object]
) -> None:
    """The ReplicaSet removes pods of the lowest cost first. Best effort: capacity does not depend
    on who leaves."""
    wanted: Mapping[str, str] = dict.fromkeys(order.leaving, GOES_FIRST)
    for pod in pods:
        place = (component_of(pod), kinds.labels_of(pod).get(REVISION_LABEL))
        if place != (order.component, order.revision):
            continue
        cost = wanted.get(kinds.uid_of(pod))
        if kinds.annotations_of(pod).get(DELETION_COST_ANNOTATION) == cost:
            continue
        patch = {
            "metadata": {
                "uid": kinds.uid_of(pod), "annotations": {DELETION_COST_ANNOTATION: cost}
            }
        }  # fmt: skip
        try:
            await cluster.patch(kinds.POD, namespace, kinds.name_of(pod), patch)
        except (NotFound, Conflict):
            continue  # it has left already
        except ApiRefused as error:
            logger.warning("Could not mark a pod", extra={"error": str(error)})


async def set_gates(
    cluster: Cluster,
    cache: ObjectCache,
    gates: Sequence[tuple[Object, ReadinessGate]],
    *,
    now_text: Callable[[], str],
) -> None:
    """Set the readiness gates of pods; one that has gone meanwhile is passed over."""
    for pod, gate in gates:
        condition = {
            "podUid": kinds.uid_of(pod),
            "type": ROUTABLE_CONDITION,
            "status": "True" if gate.is_open else "False",
            "reason": gate.reason,
            "message": gate.message,
            "lastProbeTime": None,
            "lastTransitionTime": now_text(),
        }
        namespace, name = kinds.namespace_of(pod), kinds.name_of(pod)
        try:
            stored = await cluster.set_pod_condition(namespace, name, condition)
        except (NotFound, Conflict):
            continue
        if stored is not None:
            cache.keep(kinds.POD, stored)
