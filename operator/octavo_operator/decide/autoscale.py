"""How many replicas the load needs: one pure decision from the routers' and engines' signals.

Every target proposes a number of replicas that would bring its signal back to the target, and so do
requests that were refused for lack of room; the highest proposal counts. Going up needs all
proposals of the up-window to agree (its minimum), going down all those of the down-window (its
maximum), so that a short dip or spike moves nothing; and no minute moves more than the spec's step.
A signal that is not reported proposes nothing, and without an answer from any router the number
stays. A sum over some of the routers is less than the load: it may raise the number, never lower
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from octavo_operator.objects.quantities import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_operator.spec import LLMDeployment
    from octavo_operator.spec.autoscaling import AutoscalingSpec

TOLERANCE = 0.1  # nothing moves within this share of a target
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadSignals:
    """The load of the pool. None: not reported."""

    serving: int = 0  # routable replicas
    queued_tokens: int | None = None
    kv_usage: float | None = None  # mean over the replicas
    ttft_p95_s: float | None = None  # of about the last minute
    refused_share: float = 0.0  # requests refused for lack of room, of those that were served
    in_flight: int | None = None
    held: int | None = None  # requests that wait for any replica
    last_request_age_s: float | None = None
    running: int | None = None  # sequences that the engines report, from any client
    is_known: bool = False  # a router answered
    is_complete: bool = False  # every router answered: the sums are the whole load


@dataclass(frozen=True, slots=True)
class DemandMark:
    """A number at a time: a proposal, or by how much the replicas were changed."""

    at: float
    value: int


@dataclass(frozen=True, slots=True)
class ScaleHistory:
    """What a decision needs of the earlier ones. Empty after a restart: the windows begin anew."""

    proposals: tuple[DemandMark, ...] = ()
    moves: tuple[DemandMark, ...] = ()
    since: float | None = None  # of the first decision
    unused_since: float | None = None  # it serves, and no router ever saw a request for it


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    replicas: int
    reason: str
    message: str
    history: ScaleHistory


@dataclass(frozen=True, slots=True)
class Scaling:
    """The last decision of the built-in autoscaler; it survives a restart here."""

    replicas: int
    reason: str  # its name and the signal behind it
    changed_at: str  # RFC 3339


class ReplicaCount(NamedTuple):
    """How many replicas there should be, and the autoscaler's decision where it made one."""

    replicas: int
    scaling: Scaling | None
    history: ScaleHistory


def reads_signals(deployment: LLMDeployment) -> bool:
    """Whether the built-in autoscaler decides."""
    rules = deployment.autoscaling
    return rules is not None and rules.provider == "octavo" and not deployment.suspend


@dataclass(frozen=True, slots=True)
class ScaleInputs:
    """What the built-in autoscaler decides from. `last` is its decision in the status;
    `is_decided`: it was made by this reconcile, and stays. `now` is monotonic."""

    last: Scaling | None
    history: ScaleHistory
    signals: LoadSignals
    now: float
    now_text: str
    is_decided: bool = False


def wanted_replicas(deployment: LLMDeployment, inputs: ScaleInputs) -> ReplicaCount:
    """By the spec, or by the built-in autoscaler."""
    history = inputs.history
    rules = deployment.autoscaling
    if rules is None or deployment.suspend:
        return ReplicaCount(deployment.wanted_replicas, None, history)
    if rules.provider != "octavo":  # it writes spec.replicas through the scale subresource
        replicas = rules.clamp(deployment.replicas) if deployment.replicas else 0
        return ReplicaCount(replicas, None, history)
    return follow(rules, deployment.replicas, inputs)


def follow(rules: AutoscalingSpec, start: int, inputs: ScaleInputs) -> ReplicaCount:
    """By the built-in autoscaler, from its last decision, or from `start` where it made none."""
    last, history = inputs.last, inputs.history
    if last is not None and inputs.is_decided:
        return ReplicaCount(last.replicas, last, history)
    current = rules.clamp(start) if last is None else last.replicas
    decision = decide(rules, inputs.signals, current, history, inputs.now)
    if last is not None and decision.replicas == current:
        return ReplicaCount(current, last, decision.history)  # its reason still explains the number
    reason = f"{decision.reason}: {decision.message}"
    scaling = Scaling(decision.replicas, reason, inputs.now_text)
    return ReplicaCount(decision.replicas, scaling, decision.history)


def decide(
    rules: AutoscalingSpec, signals: LoadSignals, current: int, history: ScaleHistory, now: float
) -> ScaleDecision:
    """The number of replicas, with the reason. `now` is monotonic."""
    history = _watch(history, signals, now)
    if current == 0:
        return _wake(rules, signals, history, now)
    why = _idle(rules, signals, history, now)
    if why:
        return _moved(0, current, "ScaledToZero", why, history, now)
    bounded = rules.clamp(current)
    if bounded != current:
        text = f"minReplicas is {rules.min_replicas}, maxReplicas {rules.max_replicas}"
        return _moved(bounded, current, "OutOfBounds", text, history, now)
    if not signals.is_known:
        return ScaleDecision(
            current, "NoSignals", "No router answers; the number of replicas stays", history
        )
    wanted, why = _propose(rules, signals, current)
    if not signals.is_complete and wanted <= current:
        wanted, why = current, "Not every router answers; the number of replicas is not lowered"
    history = _remember(rules, history, DemandMark(now, rules.clamp(wanted)), now)
    target = _agreed(rules, history, current, now)
    if target > current:
        return _moved(target, current, "ScaledUp", why, history, now)
    if target < current:
        return _moved(target, current, "ScaledDown", why, history, now)
    return ScaleDecision(current, "WithinTarget", why, history)


def _wake(
    rules: AutoscalingSpec, signals: LoadSignals, history: ScaleHistory, now: float
) -> ScaleDecision:
    """At once, and by as many as are needed: a share of none is none, so that no such step binds
    it, nor does it use up that of its minute."""
    floor = rules.min_replicas
    after_s = rules.scale_to_zero_after_s
    if after_s is None:
        return _moved(floor, 0, "ScaledUp", f"minReplicas is {floor}", history, now)
    if signals.held:
        replicas, why = _size_of_wake(rules, signals)
        why = f"waiting requests: {signals.held}{why}"
        return ScaleDecision(replicas, "Woken", why, history)
    # Whoever came may have given up before we looked; it will be back.
    age_s = signals.last_request_age_s
    if age_s is not None and age_s < min(MINUTE_S, after_s):
        return ScaleDecision(floor, "Woken", f"the last request arrived {age_s:.0f} s ago", history)
    return ScaleDecision(0, "ScaledToZero", "no requests", history)


def _size_of_wake(rules: AutoscalingSpec, signals: LoadSignals) -> tuple[int, str]:
    """Replicas for those that are held already, with what made them more than the fewest."""
    proposals = [
        (math.ceil(total / per_replica), f", {total} {name}; the target is {per_replica}")
        for name, total, per_replica in _totals(rules, signals)
        if total / per_replica > rules.min_replicas * (1.0 + TOLERANCE)
    ]
    if isinstance(rules.up.step, int):
        limit = max(rules.min_replicas, rules.up.step)
        proposals = [(min(replicas, limit), why) for replicas, why in proposals]
    replicas, why = max(proposals, key=lambda proposal: proposal[0], default=(0, ""))
    return rules.clamp(replicas), f"{why} per replica" if why else ""


def _idle(rules: AutoscalingSpec, signals: LoadSignals, history: ScaleHistory, now: float) -> str:
    """Why the pool is idle; "" if it may not be. Every router has to report, and no engine may
    have work: missing reports are not idleness."""
    after_s = rules.scale_to_zero_after_s
    if after_s is None or not signals.is_complete:
        return ""
    if signals.held or signals.in_flight or signals.queued_tokens or signals.running:
        return ""
    if signals.serving == 0:  # still loading: the request that woke it is to be served
        return ""
    age_s = signals.last_request_age_s
    if age_s is not None:
        return f"the last request was {age_s:.0f} s ago" if age_s >= after_s else ""
    since = history.unused_since
    if since is None or now - since < after_s:
        return ""
    return f"no request has arrived in {now - since:.0f} s of serving"


def _propose(rules: AutoscalingSpec, signals: LoadSignals, current: int) -> tuple[int, str]:
    """The highest proposal of all targets, with the sentence that explains it."""
    serving = max(1, signals.serving)
    proposals: list[tuple[int, str]] = []
    targets = rules.targets
    for name, total, per_replica in _totals(rules, signals):
        # What waits now is shared by those that start too: measured against the current target.
        is_close = abs(total / per_replica / current - 1.0) <= TOLERANCE
        replicas = current if is_close else math.ceil(total / per_replica)
        proposals.append((replicas, f"{total} {name}; the target is {per_replica} per replica"))
    means = (
        ("KV use", signals.kv_usage, targets.kv_usage, "{:.0%}"),
        ("TTFT p95", signals.ttft_p95_s, targets.ttft_s, "{:.2f} s"),
    )
    for name, value, target, form in means:
        if value is None or not target:
            continue
        is_close = abs(value / target - 1.0) <= TOLERANCE
        replicas = current if is_close else math.ceil(serving * value / target)
        text = f"{name} is {form.format(value)}; the target is {form.format(target)}"
        proposals.append((replicas, text))
    if signals.refused_share > TOLERANCE:  # queues stay short where what is too much is refused
        text = f"for 100 requests served, {100 * signals.refused_share:.0f} were refused"
        proposals.append((math.ceil(serving * (1.0 + signals.refused_share)), text))
    if not proposals:
        return current, "No signal has been reported for any target"
    return max(proposals, key=lambda proposal: proposal[0])


def _totals(rules: AutoscalingSpec, signals: LoadSignals) -> Iterator[tuple[str, int, int]]:
    """What replicas share among them, with the target for one: a name, the total, the target.

    Who is held waits for a replica as much as who is in flight has one.
    """
    targets = rules.targets
    if signals.queued_tokens is not None and targets.queued_tokens:
        yield "queued tokens", signals.queued_tokens, targets.queued_tokens
    if signals.in_flight is not None and targets.in_flight:
        yield "requests in flight", signals.in_flight + (signals.held or 0), targets.in_flight


def _agreed(rules: AutoscalingSpec, history: ScaleHistory, current: int, now: float) -> int:
    """As far as the windows agree and a minute's step allows."""
    lowest = min(mark.value for mark in history.proposals if mark.at >= now - rules.up.window_s)
    highest = max(mark.value for mark in history.proposals if mark.at >= now - rules.down.window_s)
    minute_ago = current - sum(mark.value for mark in history.moves if mark.at > now - MINUTE_S)
    if lowest > current and _has_passed(history, rules.up.window_s, now):
        step = max(1, parse_count(rules.up.step, minute_ago, round_up=True))
        return rules.clamp(max(current, min(lowest, minute_ago + step)))
    if highest < current and _has_passed(history, rules.down.window_s, now):
        step = max(1, parse_count(rules.down.step, minute_ago, round_up=True))
        return rules.clamp(min(current, max(highest, minute_ago - step)))
    return current


def _has_passed(history: ScaleHistory, window_s: float, now: float) -> bool:
    """A window that has not been watched whole proves nothing."""
    return history.since is not None and now - history.since >= window_s


def _watch(history: ScaleHistory, signals: LoadSignals, now: float) -> ScaleHistory:
    """Routers that have just started know of no request either: only a whole wait without one
    counts, from when it serves and they answer."""
    since = now if history.since is None else history.since
    is_unused = (
        signals.is_complete
        and signals.serving > 0
        and signals.last_request_age_s is None
        and not signals.running
    )
    unused_since = None
    if is_unused:
        unused_since = now if history.unused_since is None else history.unused_since
    if (since, unused_since) == (history.since, history.unused_since):
        return history
    return replace(history, since=since, unused_since=unused_since)


def _remember(
    rules: AutoscalingSpec, history: ScaleHistory, mark: DemandMark, now: float
) -> ScaleHistory:
    horizon = now - max(rules.up.window_s, rules.down.window_s)
    kept = tuple(old for old in history.proposals if old.at >= horizon)
    moves = tuple(old for old in history.moves if old.at > now - MINUTE_S)
    return replace(history, proposals=(*kept, mark), moves=moves)


def _moved(
    replicas: int, current: int, reason: str, message: str, history: ScaleHistory, now: float
) -> ScaleDecision:
    moves = (*history.moves, DemandMark(now, replicas - current))
    return ScaleDecision(replicas, reason, message, replace(history, moves=moves))
