"""The prefill pods: how many there should be, and their next step in the revisions of the others.

KV blocks go between pods of one revision only, so both sides roll out together, and a canary has
prefill pods of its own. A side that lags costs computations on the other one, and no request. How
many prefill pods there are is decided as for the pods that answer, by what they have to do alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo_operator.decide import canary
from octavo_operator.decide.autoscale import ReplicaCount, ScaleHistory, Scaling, follow
from octavo_operator.decide.rollout import next_step, recreate_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_operator.decide.autoscale import ScaleInputs
    from octavo_operator.decide.canary import CanaryState
    from octavo_operator.decide.plan import Target
    from octavo_operator.decide.rollout import RevisionGroup, RolloutStep
    from octavo_operator.spec import LLMDeployment

ASLEEP = "NothingAnswers: prefill pods run while there are pods that answer"


def reads_signals(deployment: LLMDeployment) -> bool:
    """Whether prefill pods follow what they have to do."""
    spec = deployment.prefill
    return spec is not None and spec.autoscaling is not None and not deployment.suspend


def wanted_prefill(
    deployment: LLMDeployment, answering: int, inputs: ScaleInputs
) -> ReplicaCount | None:
    """By the spec, or by what the prefill pods have to do. Zero while no pod answers, of which
    there are to be `answering`; None where the spec has no prefill pods."""
    spec = deployment.prefill
    if spec is None:
        return None
    rules = spec.autoscaling
    if rules is None:
        return ReplicaCount(spec.replicas if answering else 0, None, ScaleHistory())
    last = inputs.last
    was_asleep = last is not None and last.replicas == 0
    if not answering:
        asleep = last if was_asleep else Scaling(0, ASLEEP, inputs.now_text)
        return ReplicaCount(0, asleep, ScaleHistory())
    if was_asleep:
        inputs = replace(inputs, last=None)  # what they had to do then says nothing about now
    return follow(rules, spec.replicas, inputs)


def plan_prefill(
    wanted: int | None, answering: Target, groups: Sequence[RevisionGroup], state: CanaryState
) -> RolloutStep:
    """`answering`: the pods that answer, and `state` their rollout after its own step. Prefill pods
    leave where the spec has none (`wanted` is None), and wait at zero where nothing answers."""
    is_wanted = wanted is not None
    target = replace(answering, replicas=wanted or 0)
    if is_wanted and target.rollout.strategy == "Recreate":
        step = recreate_step(target.limits, target.revision, groups)
    else:
        is_awake = answering.replicas > 0
        shares = _shares(target, groups, state, is_wanted=is_wanted, is_awake=is_awake)
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
