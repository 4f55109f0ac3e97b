"""How many LLMDeployments may change their revision at once.

A new default image is a rollout of everybody, and a fleet has neither the room nor the patience of
its users for all of them together. Counted from what is there, so that a restart changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo_operator.reasons import Reason

if TYPE_CHECKING:
    from octavo_operator.decide.observed import DeploymentKey, Observed
    from octavo_operator.objects.kinds import Object


class Fleet(Protocol):
    """The LLMDeployments there are, as the watches know them."""

    def rolling(self) -> list[DeploymentKey]: ...

    def deployment(self, key: DeploymentKey) -> Object | None: ...


class RolloutSlot(NamedTuple):
    """What the other LLMDeployments leave to one."""

    is_held: bool  # it was admitted earlier
    is_free: bool  # it may begin, or go on
    most: int  # rollouts at a time


class RolloutAdmission(NamedTuple):
    revision: str  # to run now: the new one, or the one that serves until there is a slot
    holds_slot: bool
    waiting_for: str = ""


def admit(
    revision: str, observed: Observed, slot: RolloutSlot | None, *, is_rejected: bool
) -> RolloutAdmission:
    """Whether `revision` may run now. `slot`: None where rollouts have no bound. `is_rejected`: by
    its canary, so that it does not roll out."""
    if is_rejected:
        return RolloutAdmission(revision, holds_slot=slot is not None and slot.is_held)
    is_careful = revision not in observed.engines and observed.engines and observed.num_serving
    if slot is None or not is_careful:  # under way already, or there is nothing to be careful of
        return RolloutAdmission(revision, holds_slot=False)
    if slot.is_free:
        return RolloutAdmission(revision, holds_slot=True)
    serving = max(observed.targets, key=lambda name: observed.targets[name])
    text = f"a rollout of another LLMDeployment to end (at most {slot.most} at a time)"
    return RolloutAdmission(serving, holds_slot=slot.is_held, waiting_for=text)


class RolloutSlots:
    """Confined to the event loop."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._begun: set[DeploymentKey] = set()  # admitted, and not yet to be seen in the fleet

    def slot(self, key: DeploymentKey, *, most: int) -> RolloutSlot | None:
        """`most` of 0 is no bound."""
        if not most:
            return None
        under_way = self._under_way()
        is_free = key in under_way or len(under_way) < most
        return RolloutSlot(key in self._begun, is_free, most)

    def note(self, key: DeploymentKey, *, holds_slot: bool) -> None:
        if holds_slot:
            self._begun.add(key)
        else:
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
