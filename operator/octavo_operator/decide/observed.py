"""What an LLMDeployment has in the cluster: its children and pods, and what their state means."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    PREFILL_COMPONENT,
    REVISION_LABEL,
    ROUTABLE_CONDITION,
)
from octavo_operator.decide.rollout import RevisionGroup, RevisionReplica, group_replicas
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_operator.objects.kinds import Kind, Object


class DeploymentKey(NamedTuple):
    """One LLMDeployment."""

    namespace: str
    name: str


@dataclass(frozen=True)
class Observed:
    """One picture of what an LLMDeployment has in the cluster. Replicas are those that answer;
    `prefill` is the same picture with the prefill pods as replicas."""

    children: Mapping[tuple[Kind, str], Object] = field(default_factory=dict)
    pods: tuple[Object, ...] = ()
    component: str = ENGINE_COMPONENT

    @cached_property
    def prefill(self) -> Observed:
        return replace(self, component=PREFILL_COMPONENT)

    @cached_property
    def engines(self) -> dict[str, Object]:
        """The engine Deployments by revision."""
        return {
            revision: body
            for (kind, _), body in self.children.items()
            if kind == kinds.DEPLOYMENT
            and kinds.labels_of(body).get(COMPONENT_LABEL) == self.component
            and (revision := kinds.labels_of(body).get(REVISION_LABEL))
        }

    @cached_property
    def targets(self) -> dict[str, int]:
        return {
            revision: int(body["spec"].get("replicas", 1))
            for revision, body in self.engines.items()
        }

    def replicas(self, in_flight: Mapping[str, int]) -> list[RevisionReplica]:
        """The engine pods; `in_flight` by pod UID, as the routers report."""
        return [replica_of(pod, in_flight.get(kinds.uid_of(pod), 0)) for pod in self.engine_pods]

    @cached_property
    def engine_pods(self) -> tuple[Object, ...]:
        return tuple(
            pod
            for pod in self.pods
            if kinds.labels_of(pod).get(REVISION_LABEL)
            and component_of(pod) == self.component
            and not is_finished(pod)
        )

    @cached_property
    def num_serving(self) -> int:
        """Replicas that get traffic and stay."""
        return sum(each.routable and not each.is_leaving for each in self.replicas({}))

    def groups(self, in_flight: Mapping[str, int]) -> list[RevisionGroup]:
        return group_replicas(self.targets, self.replicas(in_flight))


def replica_of(pod: Object, in_flight: int = 0) -> RevisionReplica:
    return RevisionReplica(
        id=kinds.uid_of(pod),
        revision=kinds.labels_of(pod).get(REVISION_LABEL, ""),
        ready=condition_of(pod, "ContainersReady") == "True",
        routable=condition_of(pod, "Ready")
        == "True",  # which waits for the gate, where there is one
        in_flight=in_flight,
        is_leaving=bool(pod["metadata"].get("deletionTimestamp")),
    )


def component_of(body: Object) -> str:
    """Which side a pod, a Deployment or a ConfigMap of a revision belongs to."""
    return kinds.labels_of(body).get(COMPONENT_LABEL, ENGINE_COMPONENT)


def condition_of(body: Object, condition_type: str) -> str:
    for condition in (body.get("status") or {}).get("conditions") or []:
        if condition.get("type") == condition_type:
            return str(condition.get("status", ""))
    return ""


class GateState(Enum):
    """What the readiness gate of an engine pod needs: see `readiness_gate`."""

    SETTLED = auto()
    WAITING = auto()  # the pod is ready but for the routers' condition
    OUTDATED = auto()  # the engine restarts in place: the condition was about the previous one


def gate_state(pod: Object) -> GateState:
    is_up = condition_of(pod, "ContainersReady")
    is_open = condition_of(pod, ROUTABLE_CONDITION) == "True"
    gates = (pod.get("spec") or {}).get("readinessGates") or []
    if pod["metadata"].get("deletionTimestamp"):
        return GateState.SETTLED
    if is_open:
        return GateState.OUTDATED if is_up == "False" else GateState.SETTLED
    has_gate = any(gate.get("conditionType") == ROUTABLE_CONDITION for gate in gates)
    return GateState.WAITING if has_gate and is_up == "True" else GateState.SETTLED


def waits_for_gate(pod: Object) -> bool:
    return gate_state(pod) is GateState.WAITING


def is_finished(pod: Object) -> bool:
    """Failed or evicted: it will not serve again, and its ReplicaSet has replaced it."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
