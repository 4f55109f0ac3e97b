"""When a key is reconciled again though nothing has happened: where time alone may decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_operator.decide import autoscale, prefill
from octavo_operator.decide.flip import count_sides
from octavo_operator.decide.observed import waits_for_gate
from octavo_operator.reasons import Reason
from octavo_operator.report.faults import unexplained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_operator.errors import SpecInvalid
    from octavo_operator.report.faults import Fault
    from octavo_operator.report.loading import LoadingState
    from octavo_operator.snapshot import ReconcileSnapshot

TICK_S = 5.0
FLIP_TICK_S = 1.0  # as often as routers report
PREDECESSOR_TICK_S = 1.0
RIVAL_TICK_S = 30.0
CONFLICT_TICK_S = 60.0


def again_after(
    snapshot: ReconcileSnapshot, loading: LoadingState | None, faults: Sequence[Fault]
) -> float | None:
    """None: only an event can change the decision."""
    after_s = _next_tick(snapshot, loading)
    retries = [retry_of(snapshot.accepted.refusal)]
    if any(one.reason == Reason.ADAPTER_NAME_CONFLICT for one in snapshot.adapters.refused):
        retries.append(RIVAL_TICK_S)
    if any(fault.reason == Reason.NAME_CONFLICT for fault in faults):
        retries.append(CONFLICT_TICK_S)
    return min((s for s in (after_s, *retries) if s is not None), default=None)


def retry_of(refusal: SpecInvalid | None) -> float | None:
    """An edit of this resource is an event; that another one frees a name is not."""
    is_taken = refusal is not None and refusal.reason == "ServedNameConflict"
    return RIVAL_TICK_S if is_taken else None


def _next_tick(snapshot: ReconcileSnapshot, loading: LoadingState | None) -> float | None:
    if any("deleted LLMDeployment" in text for text in snapshot.plan.hold):
        return PREDECESSOR_TICK_S
    if not snapshot.plan.is_empty:
        return 0.0
    if snapshot.is_queued:
        return TICK_S
    deployment = snapshot.deployment
    if deployment.flips and sum(count_sides(snapshot.observed)) > 1:
        return FLIP_TICK_S
    is_scaled = autoscale.reads_signals(deployment) or prefill.reads_signals(deployment)
    if snapshot.capacity.state.revision or snapshot.trials.is_open or is_scaled:
        return TICK_S
    if not snapshot.is_done:
        observed = snapshot.observed
        waits = unexplained(observed) or any(map(waits_for_gate, observed.pods))
        is_loading = loading is not None and loading.phase in ("Fetching", "Loading")
        return TICK_S if waits or is_loading else 10 * TICK_S
    return None
