"""Adapters on trial: whether a second adapter may have all requests of the first, or gets none.

Pure, and judged as a revision's canary is: what clients got from both adapters over the same time,
as routers counted it. The spec stays as it is written: what was decided is kept in the status, and
routers are given another share. It holds until the files of either adapter are others, or the spec
names the canary no longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from octavo_operator.decide.canary import CanaryTotals, judge

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from octavo_operator.decide.canary import CanaryVerdict
    from octavo_operator.objects.kinds import Object
    from octavo_operator.spec import AdapterSpec

TrialPhase = Literal["Waiting", "Running", "Promoted", "RolledBack"]
MAX_MESSAGE = 512


@dataclass(frozen=True, slots=True)
class AdapterTrial:
    """What must survive a restart: it is kept in the resource's status."""

    name: str  # of the adapter that is tried
    of: str  # of the one whose requests it shares
    uri: str
    of_uri: str
    phase: TrialPhase = "Waiting"  # until an engine has it
    started_at: float = 0.0  # seconds since the epoch; 0: not yet
    message: str = ""

    @property
    def subject(self) -> tuple[str, str, str, str]:
        """What is compared with what: with others, a trial begins anew."""
        return self.name, self.of, self.uri, self.of_uri

    @property
    def is_open(self) -> bool:
        return self.phase in ("Waiting", "Running")

    def to_status(self) -> Object:
        status: Object = {
            "name": self.name,
            "of": self.of,
            "uri": self.uri,
            "ofUri": self.of_uri,
            "phase": self.phase,
        }
        if self.started_at:
            status["startedAt"] = self.started_at
        if self.message:
            status["message"] = self.message[:MAX_MESSAGE]
        return status


class TrialBaseline(NamedTuple):
    """What clients had got from both adapters when their trial began."""

    subject: tuple[str, str, str, str]
    totals: CanaryTotals


class TrialEvent(NamedTuple):
    """An end of a trial, for an Event."""

    is_promoted: bool
    text: str


@dataclass(frozen=True, slots=True)
class TrialDecision:
    trials: tuple[AdapterTrial, ...] = ()
    baselines: Mapping[str, TrialBaseline] = field(default_factory=dict)  # for the next decision
    events: tuple[TrialEvent, ...] = ()

    @property
    def is_open(self) -> bool:
        """Time alone may decide."""
        return any(trial.is_open for trial in self.trials)

    def routed(self, adapter: AdapterSpec) -> AdapterSpec:
        """As routers are to be given it: what was promoted has all requests of the other, what was
        rolled back none."""
        trial = next((one for one in self.trials if one.name == adapter.name), None)
        if adapter.canary is None or trial is None:
            return adapter
        if trial.phase == "Promoted":
            return replace(adapter, canary=replace(adapter.canary, percent=100))
        return replace(adapter, canary=None) if trial.phase == "RolledBack" else adapter


def decide_trials(
    adapters: Sequence[AdapterSpec],
    before: Sequence[AdapterTrial],
    baselines: Mapping[str, TrialBaseline],
    totals: Mapping[str, CanaryTotals],
    loaded: Collection[str],
    *,
    now: float,
) -> TrialDecision:
    """`totals`: by the adapter on trial, what clients got so far. `loaded`: adapters that an engine
    has."""
    uris = {adapter.name: adapter.uri for adapter in adapters}
    known = {trial.subject: trial for trial in before}
    trials: list[AdapterTrial] = []
    kept: dict[str, TrialBaseline] = {}
    events: list[TrialEvent] = []
    for adapter in adapters:
        if adapter.canary is None:
            continue
        fresh = AdapterTrial(adapter.name, adapter.canary.of, adapter.uri, uris[adapter.canary.of])
        trial = known.get(fresh.subject, fresh)
        if trial.is_open:
            counted = totals.get(adapter.name, CanaryTotals())
            trial, baseline = _judge(
                adapter, trial, baselines.get(adapter.name), counted, loaded, now
            )
            if baseline is not None:
                kept[adapter.name] = baseline
            if not trial.is_open:
                events.append(_event(trial))
        trials.append(trial)
    return TrialDecision(tuple(trials), kept, tuple(events))


def trials_from_status(status: Mapping[str, object]) -> list[AdapterTrial]:
    """Tolerant: the status may have been edited or emptied."""
    stored = status.get("adapterTrials")
    found = []
    for entry in stored if isinstance(stored, list) else []:
        if not isinstance(entry, dict) or entry.get("phase") not in get_args(TrialPhase):
            continue
        started = entry.get("startedAt")
        found.append(
            AdapterTrial(
                name=str(entry.get("name") or ""),
                of=str(entry.get("of") or ""),
                uri=str(entry.get("uri") or ""),
                of_uri=str(entry.get("ofUri") or ""),
                phase=entry["phase"],
                started_at=float(started) if isinstance(started, int | float) else 0.0,
                message=str(entry.get("message") or ""),
            )
        )
    return found


def _judge(
    adapter: AdapterSpec,
    trial: AdapterTrial,
    baseline: TrialBaseline | None,
    totals: CanaryTotals,
    loaded: Collection[str],
    now: float,
) -> tuple[AdapterTrial, TrialBaseline | None]:
    """The next state of a trial that is open."""
    assert adapter.canary is not None
    rules = adapter.canary
    if not trial.started_at:
        if trial.name not in loaded:
            waiting = f"No engine has loaded {trial.name}; {trial.of} has all requests."
            return replace(trial, message=waiting), None
        message = f"{trial.name} gets {rules.percent} % of the requests for {trial.of}."
        begun = replace(trial, phase="Running", started_at=round(now, 3), message=message)
        return begun, TrialBaseline(trial.subject, totals)
    if baseline is None or baseline.subject != trial.subject:
        baseline = TrialBaseline(trial.subject, totals)
    if not totals.is_reported:
        return trial, baseline
    before = baseline.totals
    stable, tried = totals.stable - before.stable, totals.canary - before.canary
    verdict = judge(rules.analysis, stable, tried, stable_name=trial.of)
    if verdict.action == "reject":
        return _ended(trial, "RolledBack", verdict), None
    if verdict.action == "advance" and now - trial.started_at >= rules.pause_s:
        return _ended(trial, "Promoted", verdict), None
    return trial, baseline


def _ended(trial: AdapterTrial, phase: TrialPhase, verdict: CanaryVerdict) -> AdapterTrial:
    return replace(trial, phase=phase, message=f"{verdict.reason}: {verdict.message}.")


def _event(trial: AdapterTrial) -> TrialEvent:
    if trial.phase == "Promoted":
        text = f"{trial.name} gets all requests for {trial.of}"
        return TrialEvent(is_promoted=True, text=f"{text}. {trial.message}")
    text = f"{trial.name} gets no more requests for {trial.of}"
    return TrialEvent(is_promoted=False, text=f"{text}. {trial.message}")
