"""The prefill pods' next step: in the revisions of the pods that answer, at their own number.

KV blocks go between pods of one revision only, so both sides roll out together, and a canary has
prefill pods of its own. A side that lags costs computations on the other one, and no request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo_operator.decide import canary
from octavo_operator.decide.rollout import next_step, recreate_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_operator.decide.canary import CanaryState
    from octavo_operator.decide.plan import Target
    from octavo_operator.decide.rollout import RevisionGroup, RolloutStep
    from octavo_operator.spec.prefill import PrefillSpec


def wanted_prefill(spec: PrefillSpec | None, answering: Target) -> int | None:
    """Zero where no pod answers; None where the spec has none."""
    if spec is None:
        return None
    return spec.replicas if answering.replicas else 0


def plan_prefill(
    spec: PrefillSpec | None, answering: Target, groups: Sequence[RevisionGroup], state: CanaryState
) -> RolloutStep:
    """`answering`: the pods that answer, and `state` their rollout after its own step. Prefill pods
    leave where `spec` has none, and wait at zero where nothing answers."""
    target = replace(answering, replicas=wanted_prefill(spec, answering) or 0)
    if spec is not None and target.rollout.strategy == "Recreate":
        step = recreate_step(target.limits, target.revision, groups)
    else:
        is_awake = answering.replicas > 0
        shares = _shares(target, groups, state, is_wanted=spec is not None, is_awake=is_awake)
        limits = replace(target.limits, replicas=min(target.replicas, sum(shares.values())))
        step = next_step(limits, shares, groups)
    return replace(step, waiting_for=step.waiting_for.replace("replicas of", "prefill replicas of"))


def _shares(
    target: Target,
    groups: Sequence[RevisionGroup],
    state: CanaryState,
    *,
    is_wanted: bool,
    is_awake: bool,
) -> dict[str, int]:
    """Replicas by revision, as `next_step` takes them."""
    wanted = {target.revision: target.replicas} if is_wanted else {}
    if not is_wanted and is_awake:
        # A revision with such pods is not of this spec: it serves until its rollout may begin.
        wanted = {
            group.revision: group.target for group in groups if group.revision == target.revision
        }
    is_tried = target.revision in (state.revision, state.rejected)
    if target.rollout.strategy != "Canary" or not is_tried:
        return wanted
    if not is_awake:  # the stable revision's stay, to be woken again: nothing could make them anew
        return wanted | {group.revision: 0 for group in groups}
    is_rejected = target.revision == state.rejected
    stable = next((group.target for group in groups if group.revision == state.stable), None)
    if stable is None:  # it has no prefill pods
        return {} if is_rejected else wanted
    if not is_wanted:  # what it has is not the trial's to take
        return {state.stable: stable}
    if is_rejected:
        return {state.stable: target.replicas}
    return canary.shares(target.limits, target.rollout.canary, state)
