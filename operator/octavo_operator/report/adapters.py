"""What becomes of adapters, in words: the list in an LLMDeployment's status, and the status of each
LLMAdapter. Made from what routers report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo_operator.decide.adapters import RefusedAdapter
from octavo_operator.reasons import Reason, explain
from octavo_operator.report.status import StatusCondition, merge_conditions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_operator.decide.adapters import AdapterDecision, TakenAdapter
    from octavo_operator.objects.kinds import Object

AdapterPhase = Literal["Loaded", "Loading", "Failed", "Unloaded"]
MAX_LISTED = 512  # adapters in a status
MAX_PODS = 16  # named of each
# With more adapters than this, the list is renewed at most every so often: which are loaded changes
# with every request then.
FEW_ADAPTERS, RENEW_S = 32, 10.0
MAX_MESSAGE = 512


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What routers say of one adapter."""

    phase: AdapterPhase
    pods: tuple[str, ...] = ()  # names of pods that have it
    message: str = ""  # why it is not loaded

    def to_status(self) -> Object:
        status: Object = {"phase": self.phase, "loadedOn": len(self.pods)}
        if self.pods:
            status["pods"] = list(self.pods[:MAX_PODS])
        if self.message:
            status["message"] = self.message[:MAX_MESSAGE]
        return status


def find_reports(
    taken: Sequence[TakenAdapter],
    states: Mapping[str, tuple[str, str]],
    pods_of: Mapping[str, tuple[str, ...]],
    *,
    has_engine: bool,
) -> dict[str, AdapterReport]:
    """By adapter. `states`: what routers say, and why; `pods_of`: who has it loaded."""
    reports = {}
    for one in taken:
        name = one.adapter.name
        state, reason = states.get(name, ("", ""))
        pods = pods_of.get(name, ())
        if pods:
            reports[name] = AdapterReport("Loaded", pods, reason)
        elif state == "failed":
            reports[name] = AdapterReport("Failed", message=reason or "No engine could load it.")
        elif not has_engine:
            reports[name] = AdapterReport("Unloaded", message="No engine is ready.")
        elif not state:
            reports[name] = AdapterReport("Unloaded", message="No router has reported it yet.")
        elif state == "loading":
            reports[name] = AdapterReport("Loading", message="An engine is loading it.")
        else:
            text = "Every slot has an adapter that is requested more; a request loads it."
            reports[name] = AdapterReport("Unloaded", message=text)
    return reports


def adapter_list(
    decision: AdapterDecision, reports: Mapping[str, AdapterReport]
) -> list[dict[str, object]]:
    """For the status of the LLMDeployment."""
    listed = []
    for adapter, resource in decision.taken[:MAX_LISTED]:
        entry: dict[str, object] = {"name": adapter.name, "uri": adapter.uri}
        if resource:
            entry["resource"] = resource
        listed.append(entry | reports[adapter.name].to_status())
    return listed


def adapter_status(
    found: AdapterReport | RefusedAdapter,
    generation: int,
    previous: Mapping[str, object],
    now: str,
) -> Object:
    """Of an LLMAdapter."""
    if isinstance(found, RefusedAdapter):
        text = explain(found.reason, found.message)
        shown: Object = {"phase": "Failed", "loadedOn": 0, "message": text[:MAX_MESSAGE]}
        conditions = [
            StatusCondition("Accepted", "False", found.reason, text),
            StatusCondition("Loaded", "False", found.reason, text),
        ]
    else:
        reason, is_loaded = _PHASES[found.phase]
        where = f"{len(found.pods)} pod" + "s" * (len(found.pods) != 1)
        fact = f"It is loaded on {where}" if found.pods else found.message
        shown = found.to_status()
        conditions = [
            StatusCondition("Accepted", "True", Reason.ACCEPTED, "The spec is valid."),
            StatusCondition("Loaded", is_loaded, reason, explain(reason, fact)),
        ]
    merged = merge_conditions(conditions, previous, generation, now)
    return {"observedGeneration": generation, **shown, "conditions": merged}


_PHASES: Mapping[AdapterPhase, tuple[Reason, Literal["True", "False"]]] = {
    "Loaded": (Reason.ADAPTER_LOADED, "True"),
    "Loading": (Reason.ADAPTER_LOADING, "False"),
    "Failed": (Reason.ADAPTER_NOT_LOADED, "False"),
    "Unloaded": (Reason.ADAPTER_UNLOADED, "False"),
}
