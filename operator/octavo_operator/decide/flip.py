"""Pods that change sides: which of them compute prompts for the others now, by spec.prefill.flip.

A pod's side is a label on it, which routers and the Service follow within a second; its engine can
do both and is not restarted. How many pods there are is not decided here: each of them goes where
clients feel it most (`protocol.sides`), and comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.protocol.kubernetes import (
    ANSWERS_SIDE,
    PREFILL_COMPONENT,
    PROMPTS_SIDE,
    REVISION_LABEL,
    SIDE_LABEL,
)
from octavo_engine.protocol.sides import EngineReport, SideHistory, follow_sides
from octavo_operator.decide.observed import component_of, replica_of
from octavo_operator.objects import kinds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_engine.protocol.sides import SideChange
    from octavo_operator.decide.observed import Observed
    from octavo_operator.objects.kinds import Object
    from octavo_operator.spec.prefill import FlipSpec


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What an engine reported to routers last."""

    running: int = 0
    queued_tokens: int = 0
    computed_tokens: int = 0
    prompt_token_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FlipSignals:
    """What routers report of a pool for this decision."""

    engines: Mapping[str, EngineFigures] = field(default_factory=dict)  # ready ones, by pod UID
    prompt_tokens: float = 0.0  # of a typical prompt that another pod may compute


class LastFlip(NamedTuple):
    """The last change of sides; it survives a restart in the status."""

    reason: str
    changed_at: str  # RFC 3339


@dataclass(frozen=True, slots=True)
class FlipDecision:
    """Pods that change sides, and what the status and the next decision need."""

    moves: tuple[tuple[Object, dict[str, str]], ...] = ()  # pods, and the label that they get
    details: tuple[str, ...] = ()  # for logs and events
    last: LastFlip | None = None
    histories: Mapping[str, SideHistory] = field(default_factory=dict)  # by revision


NO_FLIPS = FlipDecision()


def computes_prompts(pod: Object) -> bool:
    """Whether it is on the prompts' side now."""
    side = kinds.labels_of(pod).get(SIDE_LABEL, "")
    return side == PROMPTS_SIDE if side else component_of(pod) == PREFILL_COMPONENT


def pods_of_both(observed: Observed) -> tuple[Object, ...]:
    return (*observed.engine_pods, *observed.prefill.engine_pods)


def is_labelled(observed: Observed) -> bool:
    """Whether the label says of every pod on which side it is: those of revisions before
    spec.prefill.flip have none."""
    return all(SIDE_LABEL in kinds.labels_of(pod) for pod in pods_of_both(observed))


def count_sides(observed: Observed) -> tuple[int, int]:
    """Pods that get traffic and stay: those that answer, and those that compute prompts."""
    serving = [pod for pod in pods_of_both(observed) if _serves(pod)]
    computing = sum(map(computes_prompts, serving))
    return len(serving) - computing, computing


def plan_flips(
    spec: FlipSpec | None,
    observed: Observed,
    signals: FlipSignals,
    last: LastFlip | None,
    histories: Mapping[str, SideHistory],
    *,
    now: float,
    now_text: str,
    is_decided: bool = False,
) -> FlipDecision:
    """KV blocks go between pods of one revision only, so that each is decided for itself. `last`
    is from the status; `is_decided`: by this reconcile already."""
    if spec is None:
        return NO_FLIPS
    if is_decided:
        return FlipDecision(last=last, histories=histories)
    moves: list[tuple[Object, dict[str, str]]] = []
    details: list[str] = []
    kept: dict[str, SideHistory] = {}
    for revision, pods in _by_revision(observed, signals).items():
        # What came before the first look is not known: nothing changes for the first seconds.
        history = histories.get(revision) or SideHistory(now, changed_at=now)
        reports = [_report(pod, signals) for pod in pods]
        kept[revision], change = follow_sides(
            history, reports, signals.prompt_tokens, spec.targets, spec.limits, now
        )
        if change is None:
            continue
        changing = _moves(pods, change)
        moves += changing
        names = [kinds.name_of(pod) for pod, _ in changing]
        side = "compute prompts" if change.to_prompts else "answer"
        details.append(f"Flipped {', '.join(names)} to {side}: {change.reason}")
        last = LastFlip(change.reason, now_text)
    return FlipDecision(tuple(moves), tuple(details), last, kept)


def _by_revision(observed: Observed, signals: FlipSignals) -> dict[str, list[Object]]:
    """Those that can be on either side and get traffic now."""
    found: dict[str, list[Object]] = {}
    for pod in pods_of_both(observed):
        labels = kinds.labels_of(pod)
        if _serves(pod) and SIDE_LABEL in labels and kinds.uid_of(pod) in signals.engines:
            found.setdefault(labels[REVISION_LABEL], []).append(pod)
    return found


def _serves(pod: Object) -> bool:
    replica = replica_of(pod)
    return replica.routable and not replica.is_leaving


def _report(pod: Object, signals: FlipSignals) -> EngineReport:
    figures = signals.engines[kinds.uid_of(pod)]
    return EngineReport(
        kinds.uid_of(pod), computes_prompts(pod), figures.running, figures.queued_tokens,
        figures.computed_tokens, figures.prompt_token_s, figures.step_s,
    )  # fmt: skip


def _moves(pods: Sequence[Object], change: SideChange) -> list[tuple[Object, dict[str, str]]]:
    sides = dict.fromkeys(change.to_prompts, PROMPTS_SIDE)
    sides |= dict.fromkeys(change.to_answers, ANSWERS_SIDE)
    by_uid = {kinds.uid_of(pod): pod for pod in pods}
    return [(by_uid[uid], {SIDE_LABEL: side}) for uid, side in sides.items()]
