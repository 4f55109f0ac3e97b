"""Canary rollouts: how much traffic the new revision gets, and whether it has earned more.

A pure walk over steps. The judgement compares what clients got from the canary with what they got
from the stable revision over the same time, as counted by the routers. No routers, or too few
requests, mean no judgement: the canary stays where it is. Once judged bad, a revision stays
rejected until the spec changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from octavo_engine.protocol.state import TTFT_BOUNDS_S

if TYPE_CHECKING:
    from octavo_operator.decide.rollout import RolloutLimits
    from octavo_operator.spec.traffic import Analysis, CanarySpec, RolloutSpec


# Below these, differences do not matter and ratios are meaningless.
MIN_TTFT_S = 0.05
MIN_ITL_S = 0.005


@dataclass(frozen=True, slots=True)
class Sample:
    """What clients got from one revision over some time; sums over all router replicas."""

    requests: int = 0
    errors: int = 0
    ttft_s_sum: float = 0.0
    ttft_count: int = 0
    itl_s_sum: float = 0.0
    itl_count: int = 0
    ttft_buckets: tuple[int, ...] = ()  # at or below each of TTFT_BOUNDS_S, then all
    refused: int = 0  # for lack of room

    @property
    def error_rate(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    @property
    def itl_s(self) -> float | None:
        return self.itl_s_sum / self.itl_count if self.itl_count else None

    @property
    def ttft_p95_s(self) -> float | None:
        return quantile(0.95, self.ttft_buckets) if self.ttft_count else None

    def __sub__(self, other: Sample) -> Sample:
        ours, theirs = self.ttft_buckets, other.ttft_buckets
        if not theirs:
            theirs = (0,) * len(ours)
        return Sample(
            requests=self.requests - other.requests,
            errors=self.errors - other.errors,
            ttft_s_sum=self.ttft_s_sum - other.ttft_s_sum,
            ttft_count=self.ttft_count - other.ttft_count,
            itl_s_sum=self.itl_s_sum - other.itl_s_sum,
            itl_count=self.itl_count - other.itl_count,
            ttft_buckets=tuple(a - b for a, b in zip(ours, theirs, strict=False)),
            refused=self.refused - other.refused,
        )

    def __add__(self, other: Sample) -> Sample:
        ours, theirs = self.ttft_buckets, other.ttft_buckets
        size = max(len(ours), len(theirs))
        ours += (0,) * (size - len(ours))
        theirs += (0,) * (size - len(theirs))
        return Sample(
            requests=self.requests + other.requests,
            errors=self.errors + other.errors,
            ttft_s_sum=self.ttft_s_sum + other.ttft_s_sum,
            ttft_count=self.ttft_count + other.ttft_count,
            itl_s_sum=self.itl_s_sum + other.itl_s_sum,
            itl_count=self.itl_count + other.itl_count,
            ttft_buckets=tuple(a + b for a, b in zip(ours, theirs, strict=True)),
            refused=self.refused + other.refused,
        )


Action = Literal["hold", "advance", "reject"]


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    action: Action
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class CanaryState:
    """What must survive a restart: it is kept in the resource's status."""

    stable: str = ""  # the revision that was fully rolled out last
    revision: str = ""  # the one on trial
    step: int = 0
    step_started_at: float = 0.0  # seconds since the epoch; 0: its replicas are not there yet
    rejected: str = ""  # the revision that failed, until the spec names another
    message: str = ""


HOLD = CanaryVerdict("hold", "CanaryWaitingForTraffic", "No router has reported canary metrics.")


@dataclass(frozen=True, slots=True)
class CanaryTotals:
    """What clients got from both revisions so far."""

    stable: Sample = field(default_factory=Sample)
    canary: Sample = field(default_factory=Sample)
    is_reported: bool = False  # some router reports now: these are not old ones


class CanaryBaseline(NamedTuple):
    """Both revisions' totals when a step of the canary began."""

    revision: str
    step: int
    totals: CanaryTotals


def quantile(q: float, buckets: tuple[int, ...]) -> float | None:
    """From cumulative counts; linear within a bucket, the last bound beyond the last."""
    if not buckets or buckets[-1] <= 0:
        return None
    rank = q * buckets[-1]
    below, lower = 0, 0.0
    for bound, count in zip(TTFT_BOUNDS_S, buckets, strict=False):
        if count >= rank:
            inside = count - below
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        below, lower = count, bound
    return TTFT_BOUNDS_S[-1]


class TrialJudgement(NamedTuple):
    verdict: CanaryVerdict
    baseline: CanaryBaseline | None  # for the next judgement


def judge_trial(
    rollout: RolloutSpec,
    state: CanaryState,
    totals: CanaryTotals,
    previous: CanaryBaseline | None,
) -> TrialJudgement:
    """The canary against the stable revision since its step began: `previous` says what clients
    had got by then, unless the step begins now."""
    if not state.revision or rollout.strategy != "Canary":
        return TrialJudgement(HOLD, None)
    baseline = previous
    if baseline is None or baseline[:2] != (state.revision, state.step):
        baseline = CanaryBaseline(state.revision, state.step, totals)
    if not totals.is_reported:
        return TrialJudgement(HOLD, baseline)
    before = baseline.totals
    stable, trial = totals.stable - before.stable, totals.canary - before.canary
    return TrialJudgement(judge(rollout.canary.analysis, stable, trial), baseline)


def judge(
    analysis: Analysis, stable: Sample, canary: Sample, *, stable_name: str = "the stable revision"
) -> CanaryVerdict:
    """Worse, good, or not enough to say. Errors are judged first: they need the least evidence."""
    if canary.requests < analysis.min_requests:
        return CanaryVerdict(
            "hold",
            "CanaryWaitingForTraffic",
            f"{canary.requests} of {analysis.min_requests} requests needed for an analysis",
        )
    # The stable revision's errors are the clients' or the cluster's: the canary may have them too.
    if canary.error_rate > stable.error_rate + analysis.max_error_rate:
        return CanaryVerdict(
            "reject",
            "CanaryErrorRate",
            f"{canary.error_rate:.1%} of {canary.requests} requests failed; {stable_name} "
            f"had {stable.error_rate:.1%}",
        )
    ttft, itl = analysis.max_ttft_p95_ratio, analysis.max_itl_ratio
    for name, ours, theirs, ratio, floor_s in (
        ("TTFT p95", canary.ttft_p95_s, stable.ttft_p95_s, ttft, MIN_TTFT_S),
        ("ITL", canary.itl_s, stable.itl_s, itl, MIN_ITL_S),
    ):
        if ours is None or theirs is None:
            continue
        if ours > max(theirs, floor_s) * ratio:
            return CanaryVerdict(
                "reject",
                "CanarySlow",
                f"{name} was {ours * 1e3:.0f} ms; {stable_name} had {theirs * 1e3:.0f} ms, "
                f"of which {ratio:g} times are allowed",
            )
    return CanaryVerdict(
        "advance", "CanaryHealthy", f"{canary.requests} requests analysed as healthy"
    )


def begin(state: CanaryState, revision: str) -> CanaryState:
    """Put `revision` on trial; a trial that already runs goes on."""
    if state.revision == revision:
        return state
    return CanaryState(stable=state.stable, revision=revision)


def advance(
    state: CanaryState, rules: CanarySpec, verdict: CanaryVerdict, now: float, *, is_in_place: bool
) -> CanaryState:
    """The next state of a running trial. `is_in_place`: the step's replicas are routable."""
    if verdict.action == "reject":
        return CanaryState(
            stable=state.stable,
            rejected=state.revision,
            message=f"{verdict.reason}: {verdict.message}",
        )
    if not is_in_place:
        return replace(state, step_started_at=0.0)
    if not state.step_started_at:
        return replace(state, step_started_at=round(now, 3))
    if verdict.action != "advance":
        return state
    if now - state.step_started_at < rules.steps[state.step].pause_s:
        return state
    return replace(state, step=state.step + 1, step_started_at=0.0)


def is_complete(state: CanaryState, rules: CanarySpec) -> bool:
    return state.step >= len(rules.steps)


def shares(limits: RolloutLimits, rules: CanarySpec, state: CanaryState) -> dict[str, int]:
    """Replicas by revision at this step: the stable ones keep what their traffic needs."""
    replicas = limits.replicas
    if is_complete(state, rules):
        return {state.revision: replicas}
    if replicas == 0:  # no replica serves: both wait until one does
        return {state.stable: 0, state.revision: 0}
    weight = rules.steps[state.step].weight
    canary = max(1, -(-replicas * weight // 100)) if weight else 0
    stable = -(-replicas * (100 - weight) // 100)
    if canary + stable > limits.most:  # no surge allowed: the canary takes one's place
        stable = max(0, limits.most - canary)
    return {state.stable: stable, state.revision: canary}


def weights(rules: CanarySpec, state: CanaryState) -> dict[str, int]:
    """Traffic by revision, in percent, for the routers."""
    if is_complete(state, rules):
        return {state.revision: 100}
    weight = rules.steps[state.step].weight
    return {state.stable: 100 - weight, state.revision: weight}
