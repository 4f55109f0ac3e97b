"""The readiness gate of an engine pod: open while the engine is ready and routers send it traffic.

Normally every router has to hold the pod. One that does not tell its state must not block all
rollouts: after a while the gate opens where all that do tell hold the pod, and they are at least
half. A router that tells and does not hold the pod is waited for; its clients would lose the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_operator.watch.world import loses_gate, waits_for_gate

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Object
    from octavo_operator.routers.poller import Holders

QUORUM_AFTER_S = 30.0


class ReadinessGate(NamedTuple):
    """What the condition is to become, and why."""

    is_open: bool
    reason: str
    message: str


def decide(pod: Object, holders: Holders, waited_s: float) -> ReadinessGate | None:
    """None: as it is. `waited_s`: for how long a quorum has held the pod already."""
    if loses_gate(pod):
        return ReadinessGate(
            False, "EngineNotReady", "the engine is not ready; routers must take it anew"
        )
    if not waits_for_gate(pod):
        return None
    told = f"held by {holders.holding} of {holders.total} routers"
    if holders.are_all:
        return ReadinessGate(
            True, "HeldByAllRouters", told if holders.total else "there is no router"
        )
    if has_quorum(holders) and waited_s >= QUORUM_AFTER_S:
        silent = holders.total - holders.answering
        return ReadinessGate(
            True, "HeldByQuorum", f"{told}; {silent} did not tell for {waited_s:.0f} s"
        )
    return None


def has_quorum(holders: Holders) -> bool:
    """All that tell hold the pod, and they are at least half of all."""
    return holders.holding == holders.answering and 0 < holders.total <= 2 * holders.holding
