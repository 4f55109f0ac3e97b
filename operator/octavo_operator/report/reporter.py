"""Reports one LLMDeployment: finds faults, writes the status, records Events; each once.

Events about its pods are listed here, and only while a pod does not come up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo_engine.protocol.kubernetes import REVISION_LABEL
from octavo_operator.cluster.guard import TokenBucket
from octavo_operator.decide.adapters import RefusedAdapter
from octavo_operator.decide.flip import count_sides
from octavo_operator.decide.group import workers_by_leader
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.errors import Conflict, NotFound
from octavo_operator.objects import kinds, labels
from octavo_operator.reasons import Reason
from octavo_operator.report.adapters import (
    FEW_ADAPTERS,
    MAX_LISTED,
    RENEW_S,
    AdapterReport,
    adapter_list,
    adapter_status,
    find_reports,
)
from octavo_operator.report.faults import Fault, find_faults, newest_first, unexplained
from octavo_operator.report.loading import LoadingReader, found_model
from octavo_operator.report.status import Facts, refused, summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_operator.cluster.api import Cluster
    from octavo_operator.decide.accepted_spec import Accepted
    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Object
    from octavo_operator.report.events import EventRecorder
    from octavo_operator.report.loading import LoadingState
    from octavo_operator.routers.poller import RouterDemand
    from octavo_operator.snapshot import ReconcileSnapshot
    from octavo_operator.watch.world import World

WARNINGS_EVERY_S = 4.0
# What is normal for a while: how long nothing must have changed until it is a fault.
PATIENCE_S = {
    Reason.STARTUP_PROBE_FAILING: 4.0,
    Reason.NOT_ROUTABLE: 15.0,
    Reason.READINESS_PROBE_FAILING: 60.0,  # that is how loading looks from outside
}
# Lists of events are costly (nothing indexes them): of a fleet that fails together, some at a time.
EVENT_LISTS_PER_S, EVENT_LIST_BURST = 5.0, 20
MAX_SUSPECTS = 3  # pods of one LLMDeployment fail alike
MAX_WARNINGS = 10
MAX_WORD = 256  # characters of a value that an engine reports about its model


@dataclass(slots=True)
class Reported:
    """What was reported last. Losing it costs one write or one Event."""

    uid: str = ""
    progress: tuple[object, float] = ((), 0.0)  # the last picture of the rollout, and since when
    faults: frozenset[Reason] = frozenset()
    warnings: dict[str, tuple[float, list[Object]]] = field(default_factory=dict)  # by UID
    loading: LoadingState | None = None
    adapters: tuple[float, list[dict[str, object]]] = (float("-inf"), [])  # the list, and when


class Reporter:
    """Writes through the cluster it is given; keeps no state but its reader's."""

    def __init__(
        self,
        cluster: Cluster,
        world: World,
        demand: RouterDemand,
        events: EventRecorder,
        *,
        clock: Callable[[], float],
        now_text: Callable[[], str],
    ) -> None:
        self._cluster = cluster
        self._world = world
        self._demand = demand
        self._events = events
        self._clock = clock
        self._now_text = now_text
        self._loading = LoadingReader(cluster, demand, clock)
        self._event_lists = TokenBucket(
            per_second=EVENT_LISTS_PER_S, burst=EVENT_LIST_BURST, clock=clock
        )

    def forget(self, last: Reported) -> None:
        self._loading.forget(last.uid)

    async def report(
        self,
        body: Object,
        snapshot: ReconcileSnapshot,
        last: Reported,
        refusals: list[Fault],
        *,
        endpoint: str,
    ) -> None:
        """`refusals`: what the API server did not take just now, and names that are taken."""
        previous = body.get("status") or {}
        warnings = await self._warnings(snapshot, last)
        pods = _of_revision(snapshot.observed, snapshot.revision)
        workers = workers_by_leader(snapshot.observed)
        last.loading = await self._loading.read(last.uid, pods, workers)
        has_routers = self._demand.has_routers
        stalled_s = self._stalled_s(snapshot, last)
        found = find_faults(snapshot.observed, warnings, has_routers=has_routers)
        faults = refusals + [f for f in found if stalled_s >= PATIENCE_S.get(f.reason, 0.0)]
        refusal = _refusal(snapshot.accepted)
        facts = Facts(
            generation=snapshot.deployment.generation,
            revision=snapshot.revision,
            wanted=snapshot.target.replicas,
            least_serving=snapshot.target.limits.least_serving,
            is_suspended=snapshot.deployment.suspend,
            is_done=snapshot.is_done and not snapshot.plan.hold,
            waiting_for=", ".join(snapshot.plan.hold),
            replicas=snapshot.replicas,
            prefill=snapshot.prefill.replicas,
            wanted_prefill=snapshot.wanted_prefill,
            faults=faults,
            loading=last.loading,
            model=self._model(snapshot, pods, previous),
            canary=snapshot.capacity.state,
            weights=snapshot.capacity.weights,
            stalled_s=stalled_s,
            progress_deadline_s=snapshot.deployment.rollout.progress_deadline_s,
            scaling=snapshot.scaling,
            prefill_scaling=snapshot.prefill_scaling,
            sides=count_sides(snapshot.observed) if snapshot.deployment.flips else None,
            last_flip=snapshot.last_flip,
            accepted=snapshot.accepted.to_status(),
            refusal=refusal,
            unknown=snapshot.deployment.unknown,
            selector=labels.selector_text(labels.engines(snapshot.deployment.name)),
            endpoint=endpoint,
            adapters=await self._report_adapters(snapshot, last),
            trials=snapshot.trials.trials,
        )
        await self._write_status(body, summarize(facts, previous, self._now_text()), previous)
        if refusal is not None:
            faults = [refusal, *faults]
        reasons = frozenset(fault.reason for fault in faults)
        for fault in faults:
            if fault.reason not in last.faults:
                await self._events.record(body, "Warning", fault.reason, fault.message)
        last.faults = reasons

    async def refuse(self, body: Object, generation: int, reason: Reason, text: str) -> None:
        previous = body.get("status") or {}
        status = refused(generation, reason, text, previous, self._now_text())
        if await self._write_status(body, status, previous):
            await self._events.record(body, "Warning", reason, text)

    async def report_orphans(self, deployment: str, adapters: Sequence[Object]) -> None:
        """LLMAdapters whose LLMDeployment does not exist."""
        for body in adapters:
            name = kinds.name_of(body)
            text = f"There is no LLMDeployment {deployment} in this namespace"
            found = RefusedAdapter(name, Reason.DEPLOYMENT_NOT_FOUND, text)
            await self._write_adapter(body, found)

    async def _report_adapters(
        self, snapshot: ReconcileSnapshot, last: Reported
    ) -> list[dict[str, object]]:
        """Writes the status of each LLMAdapter; returns the list for the LLMDeployment's."""
        deployment, decision = snapshot.deployment, snapshot.adapters
        key = DeploymentKey(deployment.namespace, deployment.name)
        bodies = {kinds.name_of(body): body for body in self._world.adapters(key)}
        now, names = self._clock(), [one.adapter.name for one in decision.taken]
        at, listed = last.adapters
        is_fresh = now - at < RENEW_S and [entry["name"] for entry in listed] == names[:MAX_LISTED]
        for one in decision.refused:
            await self._write_adapter(bodies[one.resource], one)
        if is_fresh and len(names) > FEW_ADAPTERS:
            return listed
        pods = {kinds.uid_of(pod): kinds.name_of(pod) for pod in snapshot.observed.pods}
        holders = self._demand.adapter_holders(deployment.pool)
        reports = find_reports(
            decision.taken,
            self._demand.adapter_states(deployment.pool),
            {
                name: tuple(sorted(pods[uid] for uid in uids if uid in pods))
                for name, uids in holders.items()
            },
            has_engine=any(replica.ready for replica in snapshot.replicas),
        )
        for adapter, resource in decision.taken:
            if resource:
                await self._write_adapter(bodies[resource], reports[adapter.name])
        last.adapters = (now, adapter_list(decision, reports))
        return last.adapters[1]

    async def _write_adapter(self, body: Object, found: AdapterReport | RefusedAdapter) -> None:
        previous = body.get("status") or {}
        generation = int(body["metadata"].get("generation") or 0)
        status = adapter_status(found, generation, previous, self._now_text())
        if status == previous:
            return
        try:
            stored = await self._apply_status(body, status)
        except (Conflict, NotFound):
            return  # it was edited or deleted meanwhile, and its event comes
        self._world.keep(kinds.LLM_ADAPTER, stored)

    async def _write_status(self, body: Object, status: Object, previous: Object) -> bool:
        if status == previous:
            return False
        stored = await self._apply_status(body, status)
        self._world.keep(kinds.LLM_DEPLOYMENT, stored)
        return True

    async def _apply_status(self, body: Object, status: Object) -> Object:
        # NOTE: the status subresource ignores a uid, but not a resourceVersion: a resource that was
        # deleted and created anew, or edited meanwhile, does not get the findings of the old one.
        names = ("namespace", "name", "uid", "resourceVersion")
        return await self._cluster.apply_status(
            {
                "apiVersion": body["apiVersion"],
                "kind": body["kind"],
                "metadata": {name: body["metadata"][name] for name in names},
                "status": status,
            }
        )

    def _model(
        self, snapshot: ReconcileSnapshot, pods: Sequence[Object], previous: Object
    ) -> Object:
        """What is known of the model; of another revision's model nothing is known."""
        known = previous.get("model") if previous.get("revision") == snapshot.revision else None
        model = found_model(
            snapshot.deployment.model.uri, pods, known if isinstance(known, dict) else {}
        )
        if length := self._demand.max_model_len(snapshot.deployment.pool, snapshot.revision):
            model["maxModelLen"] = length
        if served := self._demand.model(snapshot.deployment.pool, snapshot.revision):
            found = {"id": served.id, "architecture": served.architecture, "format": served.format}
            model |= {name: value[:MAX_WORD] for name, value in found.items() if value}
        return model

    def _stalled_s(self, snapshot: ReconcileSnapshot, last: Reported) -> float:
        picture = (
            snapshot.revision,
            snapshot.target.replicas,
            snapshot.wanted_prefill,
            tuple(
                (r.id, r.ready, r.routable)
                for r in (*snapshot.replicas, *snapshot.prefill.replicas)
            ),
        )
        now = self._clock()
        if last.progress[0] != picture or snapshot.is_queued:
            last.progress = (picture, now)
        return now - last.progress[1]

    async def _warnings(
        self, snapshot: ReconcileSnapshot, last: Reported
    ) -> dict[str, list[Object]]:
        """Events about what nothing else explains. Listed, not watched: a cluster has many, and
        ours matter only while something does not come up."""
        now = self._clock()
        suspects = {
            kinds.uid_of(body): body for body in unexplained(snapshot.observed)[:MAX_SUSPECTS]
        }
        last.warnings = {u: found for u, found in last.warnings.items() if u in suspects}
        for uid, body in suspects.items():
            listed_at = last.warnings.get(uid, (float("-inf"), []))[0]
            if now - listed_at < WARNINGS_EVERY_S or not self._event_lists.try_take():
                continue  # what was found before is still reported
            listing = await self._cluster.find(
                kinds.EVENT,
                kinds.namespace_of(body),
                fields=f"involvedObject.uid={uid},type=Warning",
            )
            last.warnings[uid] = (now, newest_first(listing.items)[:MAX_WARNINGS])
        return {uid: found for uid, (_, found) in last.warnings.items()}


def _refusal(accepted: Accepted) -> Fault | None:
    error = accepted.refusal
    return None if error is None else Fault(Reason(error.reason), str(error))


def _of_revision(observed: Observed, revision: str) -> list[Object]:
    return [
        pod for pod in observed.engine_pods if kinds.labels_of(pod).get(REVISION_LABEL) == revision
    ]
