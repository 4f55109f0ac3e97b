"""Which engines compute prompts for the others, and which answer. Pure.

Decided by a router for engines of its own, and by the operator for the pods of an LLMDeployment,
from the same reports.

With k of n engines on the prompts' side, both times that a client feels are foreseen for every k:

    first token    what a prompt takes, and what it waits for others: busier with fewer engines
    each token     a step of the sequences that run, over the n - k engines that answer; with k = 0
                   a prompt's work stands between them

It starts from what is measured now: the wait for the prompts' engines, and the step of those that
answer. The k is best whose worse time, over its target, is lowest. A
side is changed only if that is much better than now, while a target is in danger, and not soon
again: an engine that changes finishes what it has, so a change helps some seconds later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_GAIN: Final = 0.1  # of the cost, for which engines change sides
IN_DANGER: Final = 0.6  # of a target, from which that is considered
HOLD_S: Final = 5.0  # after a change, until the next one
FULL: Final = 0.85  # use of a side from which its queue grows: what came lately is no promise
TAIL: Final = 3.0  # times the mean that one prompt in twenty waits
PER_SEQUENCE: Final = 0.25  # share of a step that grows with its sequences
INTERFERENCE: Final = 1.5  # times the mean that prompts delay one answer in twenty
MEASURE_S: Final = 5.0  # over which demand is averaged


class SideTargets(NamedTuple):
    """What clients are to feel, in seconds."""

    first_token_s: float
    token_s: float


class SideLimits(NamedTuple):
    """The fewest engines of each side. Where there are not enough for both, it is prompts that
    have fewer."""

    prompts: int = 0
    answers: int = 1

    def bounds(self, count: int) -> tuple[int, int]:
        """The fewest and the most of so many engines that may compute prompts."""
        most = max(0, count - max(1, self.answers))
        return min(self.prompts, most), most


class EngineReport(NamedTuple):
    """An engine that can be on either side, as it reports itself."""

    id: str
    computes: bool  # on the prompts' side now
    running: int
    queued_tokens: int
    computed_tokens: int  # since it started
    prompt_token_s: float  # to compute one
    step_s: float  # of late


class EngineLoad(NamedTuple):
    """The same, averaged."""

    id: str
    computes: bool  # on the prompts' side now
    running: int
    queued_tokens: int
    prompt_token_s: float  # to compute one
    step_s: float


class SideDemand(NamedTuple):
    """Of all engines together, over the last seconds."""

    tokens_per_s: float  # of prompts, that are to be computed
    prompt_tokens: float  # of a typical prompt


class SideCost(NamedTuple):
    """What is foreseen with so many engines on the prompts' side."""

    first_token_s: float
    token_s: float

    def over(self, targets: SideTargets) -> float:
        """Above 1 a target is missed."""
        return max(self.first_token_s / targets.first_token_s, self.token_s / targets.token_s)


class SideChange(NamedTuple):
    """Engines that change sides, by id, and why."""

    to_prompts: tuple[str, ...]
    to_answers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SideHistory:
    """What a decision needs of earlier ones. Losing it costs a few seconds."""

    at: float  # monotonic
    changed_at: float = -math.inf
    work: Mapping[str, int] = field(default_factory=dict)  # tokens computed and queued, by engine
    came: float = 0.0  # tokens a second, weighted; `weight` is what they would come to at 1
    weight: float = 0.0
    step_s: Mapping[str, float] = field(default_factory=dict)  # while sequences run, by engine


def follow_sides(
    history: SideHistory,
    reports: Sequence[EngineReport],
    prompt_tokens: float,
    targets: SideTargets,
    limits: SideLimits,
    now: float,
) -> tuple[SideHistory, SideChange | None]:
    """Measure, then decide: wants to be called every second or few. `prompt_tokens`: those of a
    typical prompt. A change that is returned counts as made."""
    history = measure(history, reports, now)
    loads = [
        EngineLoad(
            one.id, one.computes, one.running, one.queued_tokens, one.prompt_token_s,
            history.step_s.get(one.id, 0.0),
        )
        for one in reports
    ]  # fmt: skip
    demand = SideDemand(history.came / (history.weight or 1.0), prompt_tokens)
    since_change_s = now - history.changed_at
    change = decide_sides(loads, demand, targets, limits, since_change_s=since_change_s)
    return (history if change is None else replace(history, changed_at=now)), change


def measure(history: SideHistory, reports: Sequence[EngineReport], now: float) -> SideHistory:
    """Prompt tokens that came lately: those computed, and those that are queued more."""
    elapsed_s = now - history.at
    if elapsed_s <= 0.0 and history.work:
        return history
    work = {one.id: one.computed_tokens + one.queued_tokens for one in reports}
    before = history.work
    came = sum(tokens - before[id_] for id_, tokens in work.items() if id_ in before)
    weight = 1.0 - math.exp(-elapsed_s / MEASURE_S)
    step_s = {}
    for one in reports:
        if one.computes:
            continue  # of prompts: it says nothing of answers
        known = history.step_s.get(one.id)
        if one.running and one.step_s > 0.0:
            known = one.step_s if known is None else known
            step_s[one.id] = known + weight * (one.step_s - known)
        elif known is not None:
            step_s[one.id] = known
    if before:
        rate = history.came + weight * (max(came, 0) / elapsed_s - history.came)
        total = history.weight + weight * (1.0 - history.weight)
        history = replace(history, came=rate, weight=total)
    return replace(history, at=now, work=work, step_s=step_s)


def decide_sides(
    engines: Sequence[EngineLoad],
    demand: SideDemand,
    targets: SideTargets,
    limits: SideLimits | None = None,
    *,
    since_change_s: float,
) -> SideChange | None:
    """Who changes sides now; None: nobody."""
    if not engines:
        return None
    now = sum(engine.computes for engine in engines)
    limits = limits or SideLimits()
    least, most = limits.bounds(len(engines))
    if not least <= now <= most:
        return _within(engines, limits)
    if least == most or since_change_s < HOLD_S or demand.prompt_tokens <= 0.0:
        return None
    costs = foreseen(engines, demand)
    at_present = costs[now].over(targets)
    best = min(range(least, most + 1), key=lambda k: (costs[k].over(targets), abs(k - now)))
    at_best = costs[best].over(targets)
    if at_present < IN_DANGER or at_best > at_present * (1.0 - MIN_GAIN):
        return None
    reason = (
        f"{best} instead of {now} of {len(engines)} engines compute prompts: first token "
        f"{_show(costs[best].first_token_s)} instead of {_show(costs[now].first_token_s)} s "
        f"(target {targets.first_token_s:g}), each token {_show(costs[best].token_s)} instead of "
        f"{_show(costs[now].token_s)} s (target {targets.token_s:g})"
    )
    return _moved(engines, best, reason)


def _within(engines: Sequence[EngineLoad], limits: SideLimits) -> SideChange:
    """At once, whatever the load."""
    least, most = limits.bounds(len(engines))
    now = sum(engine.computes for engine in engines)
    if now < least:
        side, fewest, found = "compute prompts", limits.prompts, now
    else:
        side, fewest, found = "answer", max(1, limits.answers), len(engines) - now
    reason = f"{found} of {len(engines)} engines {side}; the fewest are {fewest}"
    return _moved(engines, max(least, min(most, now)), reason)


def _moved(engines: Sequence[EngineLoad], wanted: int, reason: str) -> SideChange:
    """The least busy first."""
    now = sum(engine.computes for engine in engines)
    if wanted > now:
        idle = sorted((e for e in engines if not e.computes), key=lambda e: (e.running, e.id))
        return SideChange(tuple(e.id for e in idle[: wanted - now]), (), reason)
    idle = sorted((e for e in engines if e.computes), key=lambda e: (e.queued_tokens, e.id))
    return SideChange((), tuple(e.id for e in idle[: now - wanted]), reason)


def foreseen(engines: Sequence[EngineLoad], demand: SideDemand) -> list[SideCost]:
    """By the number of engines on the prompts' side, from 0 to all but one."""
    count = len(engines)
    now = sum(engine.computes for engine in engines)
    token_s = sum(engine.prompt_token_s for engine in engines) / count
    work = demand.tokens_per_s * token_s  # engines that prompts alone would keep busy
    answering = [engine for engine in engines if not engine.computes]
    running = sum(engine.running for engine in engines)
    busy = [engine.step_s for engine in answering if engine.running and engine.step_s > 0.0]
    step_s = sum(busy) / len(busy) if busy else 0.0
    per_engine = max(running / max(len(answering), 1), 1.0)
    alone_s = step_s if now else step_s * (1.0 - min(work / count, FULL))
    prompt_s = demand.prompt_tokens * token_s
    costs = []
    for k in range(count):
        batch = max(running / (count - k), 1.0)
        own_s = alone_s * (1.0 - PER_SEQUENCE + PER_SEQUENCE * batch / per_engine)
        use = work / (k or count)
        first_s = prompt_s * (1.0 + _waiting(use, k or count)) + own_s
        costs.append(SideCost(first_s, own_s if k else own_s * _delayed(use)))
    computing = [engine for engine in engines if engine.computes] or engines
    queue_s = sum(e.queued_tokens * e.prompt_token_s for e in computing) / len(computing)
    costs[now] = costs[now]._replace(first_token_s=max(costs[now].first_token_s, queue_s))
    return costs


def _delayed(use: float) -> float:
    """How many times as long a step takes where prompts are computed in between."""
    return 1.0 / (1.0 - min(INTERFERENCE * use, FULL))


def _waiting(use: float, servers: int) -> float:
    """How many times its own length a prompt waits, in a queue that is this busy."""
    bounded = min(use, FULL)
    mean = bounded / (2.0 * servers * (1.0 - bounded)) + 1e4 * max(0.0, use - FULL)
    return TAIL * mean


def _show(seconds: float) -> str:
    return f"{seconds:.3g}"
