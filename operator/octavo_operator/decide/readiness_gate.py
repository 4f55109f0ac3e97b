"""The readiness gate of an engine pod: open while the engine is ready and routers send it traffic.

Normally every router has to hold the pod. One that does not report must not block all
rollouts: after a while the gate opens if all that report hold the pod, and they are at least half.
A router that reports without the pod is waited for; its clients would lose the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_operator.decide.observed import GateState, gate_state
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_operator.objects.kinds import Object

QUORUM_AFTER_S = 30.0


class Holders(NamedTuple):
    """Router replicas: those that send a pod traffic, those that report their state, all."""

    holding: int
    answering: int
    total: int
    is_known: bool  # whether it was looked which replicas there are

    @property
    def are_all(self) -> bool:
        """Without any router there is none to wait for."""
        return self.is_known and self.holding == self.total


class ReadinessGate(NamedTuple):
    """What the condition is to become, and why."""

    is_open: bool
    reason: str
    message: str


class GateChanges(NamedTuple):
    """Gates to set by pod, and since when a quorum holds those that wait, by pod UID."""

    gates: list[tuple[Object, ReadinessGate]]
    held_since: dict[str, float]


def decide(state: GateState, holders: Holders, waited_s: float) -> ReadinessGate | None:
    """None: as it is. `waited_s`: for how long a quorum has held the pod already."""
    if state is GateState.OUTDATED:
        return ReadinessGate(
            False, "EngineNotReady", "the engine is not ready; routers must admit it again"
        )
    if state is not GateState.WAITING:
        return None
    text = f"held by {holders.holding} of {holders.total} routers"
    if holders.are_all:
        return ReadinessGate(
            True, "HeldByAllRouters", text if holders.total else "there are no routers"
        )
    if has_quorum(holders) and waited_s >= QUORUM_AFTER_S:
        silent = holders.total - holders.answering
        return ReadinessGate(
            True, "HeldByQuorum", f"{text}; {silent} did not report for {waited_s:.0f} s"
        )
    return None


def decide_all(
    pods: Sequence[Object],
    holders: Mapping[str, Holders],
    held_since: Mapping[str, float],
    now: float,
) -> GateChanges:
    """The gates to set. By pod UID: `holders`, and since when a quorum has held the pod."""
    changes: list[tuple[Object, ReadinessGate]] = []
    since: dict[str, float] = {}
    for pod in pods:
        uid = kinds.uid_of(pod)
        holding = holders[uid]
        state = gate_state(pod)
        began_at = held_since.get(uid, now)
        if state is GateState.WAITING and has_quorum(holding):
            since[uid] = began_at
        if (gate := decide(state, holding, now - began_at)) is not None:
            changes.append((pod, gate))
    return GateChanges(changes, since)


def has_quorum(holders: Holders) -> bool:
    """All that report hold the pod, and they are at least half of all."""
    return holders.holding == holders.answering and 0 < holders.total <= 2 * holders.holding
