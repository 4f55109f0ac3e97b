"""How many LLMDeployments may change their revision at once.

A new default image is a rollout of everybody, and a fleet has neither the room nor the patience of
its users for all of them together. Counted from what is there, so that a restart changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_operator.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_operator.decide.observed import DeploymentKey, Observed
    from octavo_operator.decide.rollout import RevisionReplica
    from octavo_operator.objects.kinds import Object


class Fleet(Protocol):
    """The LLMDeployments there are, as the watches know them."""

    def rolling(self) -> list[DeploymentKey]: ...

    def deployment(self, key: DeploymentKey) -> Object | None: ...


class RolloutSlots:
    """Confined to the event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._begun: set[DeploymentKey] = set()  # admitted, and not yet to be seen in the fleet

    def admit(
        self,
        key: DeploymentKey,
        revision: str,
        observed: Observed,
        replicas: Iterable[RevisionReplica],
        *,
        most: int,
    ) -> str:
        """The revision to run now: `revision`, or the one that serves until there is a slot.
        `most` of 0 is no bound."""
        serving = any(replica.routable and not replica.is_leaving for replica in replicas)
        if not most or revision in observed.engines or not observed.engines or not serving:
            self.release(key)  # under way already, or there is nothing to be careful of
            return revision
        under_way = self._under_way()
        if key in under_way or len(under_way) < most:
            self._begun.add(key)
            return revision
        return max(observed.targets, key=lambda name: observed.targets[name])

    def release(self, key: DeploymentKey) -> None:
        self._begun.discard(key)

    def _under_way(self) -> set[DeploymentKey]:
        candidates = {*self._begun, *self._fleet.rolling()}
        return {key for key in candidates if not self._is_stuck(key)}

    def _is_stuck(self, key: DeploymentKey) -> bool:
        """One that gets nowhere must not hold up the others."""
        status = (self._fleet.deployment(key) or {}).get("status") or {}
        return any(
            condition.get("reason") == Reason.PROGRESS_DEADLINE_EXCEEDED
            or (condition.get("type"), condition.get("status")) == ("Accepted", "False")
            for condition in status.get("conditions") or ()
        )
