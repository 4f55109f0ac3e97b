"""An adapter on trial gets all requests of the other or none, by what clients got from both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from octavo_engine.protocol.state import (
    TTFT_BOUNDS_S,
    EndpointState,
    PoolState,
    RevisionState,
    State,
)
from octavo_operator.decide.adapter_trials import (
    AdapterTrial,
    TrialDecision,
    decide_trials,
    trials_from_status,
)
from octavo_operator.decide.canary import CanaryTotals, Sample
from octavo_operator.objects import kinds
from octavo_operator.spec.adapters import AdapterCanary, AdapterSpec
from octavo_operator.spec.traffic import Analysis
from tests.fakes.operator import OperatorBench

LAW = AdapterSpec("law", "file:///law")
NEXT = AdapterSpec("next", "file:///next", canary=AdapterCanary("law", 10, 60.0, Analysis()))
BOTH = (LAW, NEXT)


def sample(requests: int, errors: int = 0, ttft_s: float = 0.1) -> Sample:
    buckets = (*(requests if ttft_s <= bound else 0 for bound in TTFT_BOUNDS_S), requests)
    return Sample(requests, errors, ttft_s * requests, requests, 0.0, 0, buckets)


def totals(stable: Sample, trial: Sample, *, is_reported: bool = True) -> dict[str, CanaryTotals]:
    return {"next": CanaryTotals(stable, trial, is_reported=is_reported)}


NOTHING = totals(Sample(), Sample())


def step(
    before: TrialDecision, counted: dict[str, CanaryTotals], now: float, adapters: Any = BOTH
) -> TrialDecision:
    return decide_trials(
        adapters, before.trials, before.baselines, counted, ("law", "next"), now=now
    )


def running(counted: dict[str, CanaryTotals] = NOTHING) -> TrialDecision:
    return step(TrialDecision(), counted, 100.0)


def phase(decision: TrialDecision) -> str:
    (trial,) = decision.trials
    return trial.phase


def percent(decision: TrialDecision) -> int | None:
    canary = decision.routed(NEXT).canary
    return None if canary is None else canary.percent


def test_it_waits_until_an_engine_has_it():
    found = decide_trials(BOTH, (), {}, NOTHING, ("law",), now=100.0)
    assert (phase(found), found.trials[0].started_at, percent(found)) == ("Waiting", 0.0, 10)
    assert "No engine has loaded next" in found.trials[0].message
    assert phase(step(found, NOTHING, 500.0)) == "Running"


@pytest.mark.parametrize(
    ("trial", "after_s", "expected", "share"),
    [
        (sample(200), 59.0, "Running", 10),
        (sample(200), 60.0, "Promoted", 100),
        (sample(49), 6000.0, "Running", 10),  # too few to say
        (sample(200, errors=5), 1.0, "RolledBack", None),  # at once
        (sample(200, ttft_s=1.0), 1.0, "RolledBack", None),
    ],
)
def test_it_is_judged_as_a_revision_is(
    trial: Sample, after_s: float, expected: str, share: int | None
):
    found = step(running(), totals(sample(1000), trial), 100.0 + after_s)
    assert (phase(found), percent(found)) == (expected, share)
    assert [event.is_promoted for event in found.events] == {
        "Running": [], "Promoted": [True], "RolledBack": [False],
    }[expected]  # fmt: skip
    assert found.routed(LAW) == LAW


def test_the_figures_are_in_the_event():
    found = step(running(), totals(sample(1000), sample(100, errors=10)), 101.0)
    assert found.events[0].text == (
        "next gets no more requests for law. "
        "CanaryErrorRate: 10.0% of 100 requests failed; law had 0.0%."
    )


def test_what_was_counted_before_it_began_is_no_evidence():
    """Failures of an earlier trial, or while nobody looked."""
    old = totals(sample(1000), sample(500, errors=500))
    found = step(running(old), old, 500.0)
    assert phase(found) == "Running"
    more = totals(sample(2000), sample(700, errors=500))
    assert phase(step(found, more, 501.0)) == "Promoted"


def test_an_operator_that_has_started_anew_watches_from_then_on():
    bad = totals(sample(1000), sample(500, errors=500))
    resumed = replace(running(), baselines={})
    assert phase(step(resumed, bad, 161.0)) == "Running"


def test_without_a_router_nothing_is_decided():
    silent = totals(sample(1000), sample(500), is_reported=False)
    assert phase(step(running(), silent, 1e6)) == "Running"


@pytest.mark.parametrize("fared", [sample(200), sample(200, errors=50)])
def test_an_end_holds_until_the_files_of_one_are_others(fared: Sample):
    ended = step(running(), totals(sample(1000), fared), 200.0)
    assert not ended.is_open
    assert step(ended, totals(sample(1000), sample(400, errors=90)), 300.0).trials == ended.trials
    other_share = (LAW, replace(NEXT, canary=AdapterCanary("law", 50)))
    assert step(ended, NOTHING, 300.0, other_share).trials == ended.trials
    assert step(ended, NOTHING, 300.0, (LAW, replace(NEXT, canary=None))).trials == ()
    for other in ((replace(LAW, uri="file:///3"), NEXT), (LAW, replace(NEXT, uri="file:///3"))):
        assert phase(step(ended, NOTHING, 300.0, other)) == "Running"


def test_the_status_is_read_as_it_was_written():
    ended = step(running(), totals(sample(1000), sample(200, errors=50)), 200.0)
    status = {"adapterTrials": [trial.to_status() for trial in ended.trials]}
    assert tuple(trials_from_status(json.loads(json.dumps(status)))) == ended.trials


@pytest.mark.parametrize("stored", [None, "x", [None], [{"phase": "Other"}], [{"name": "a"}]])
def test_a_status_that_was_edited_is_none(stored: object):
    assert trials_from_status({"adapterTrials": stored}) == []
    assert trials_from_status({"adapterTrials": [{"phase": "Running", "startedAt": "x"}]}) == [
        AdapterTrial("", "", "", "", "Running")
    ]


class TestStory:
    """Through the reconciler, with a router that counts."""

    def begun(self) -> OperatorBench:
        bench = self.bench = OperatorBench()
        canary = {"of": "law", "percent": 20, "pause": "1m", "analysis": {"minRequests": 20}}
        adapters = [
            {"name": "law", "uri": "file:///law"},
            {"name": "next", "uri": "file:///next", "canary": canary},
        ]
        bench.create(adapters=adapters)
        bench.settle()
        bench.demand.expect(["router-0"])
        self.report()
        return bench

    def report(self, *, law: int = 0, trial: int = 0, errors: int = 0) -> None:
        endpoints = [
            EndpointState(kinds.uid_of(pod), "default/smollm2", "", "http://x", "ready",
                          adapters=["law", "next"])
            for pod in self.bench.pods()
        ]  # fmt: skip
        trials = [RevisionState("law", law), RevisionState("next", trial, errors)]
        pool = PoolState("default/smollm2", adapter_trials=trials)
        self.bench.demand.learn("router-0", State("epoch", "router-0", [pool], endpoints))
        self.bench.settle()

    def routed(self) -> dict[str, Any]:
        service = self.bench.cluster.one(kinds.SERVICE, "default", "smollm2")
        routing = json.loads(kinds.annotations_of(service)["octavo.dev/routing"])
        return {one["name"]: one.get("canary") for one in routing["adapters"]}

    def trial(self) -> dict[str, Any]:
        (trial,) = self.bench.deployment()["status"]["adapterTrials"]
        found: dict[str, Any] = trial
        return found

    def events(self) -> list[tuple[str, str]]:
        found = self.bench.cluster.all(kinds.EVENT)
        return [(e["type"], e["reason"]) for e in found if e["reason"].startswith("Adapter")]

    def test_a_good_one_gets_all_the_requests(self):
        bench = self.begun()
        pods = [kinds.uid_of(pod) for pod in bench.pods()]
        assert self.trial()["phase"] == "Running"
        assert self.routed() == {"law": None, "next": {"of": "law", "percent": 20}}
        assert bench.reconcile().again_after_s == 5.0  # no event comes when the pause is over
        self.report(law=80, trial=20)
        assert self.trial()["phase"] == "Running"
        bench.clock.advance(61)
        self.report(law=160, trial=40)
        assert self.trial()["phase"] == "Promoted"
        assert self.routed()["next"] == {"of": "law", "percent": 100}
        assert self.events() == [("Normal", "AdapterPromoted")]
        bench.clock.advance(61)
        self.report(law=160, trial=400, errors=300)  # the other one is not compared any more
        assert self.trial()["phase"] == "Promoted"
        assert bench.reconcile().again_after_s is None
        assert [kinds.uid_of(pod) for pod in bench.pods()] == pods

    def test_a_bad_one_gets_none_and_is_not_tried_again(self):
        bench = self.begun()
        pods = [kinds.uid_of(pod) for pod in bench.pods()]
        self.report(law=80, trial=20, errors=10)
        assert self.trial()["phase"] == "RolledBack"
        assert "50.0% of 20 requests failed; law had 0.0%" in self.trial()["message"]
        assert self.routed() == {"law": None, "next": None}
        assert self.events() == [("Warning", "AdapterRolledBack")]
        bench.clock.advance(61)
        self.report(law=800, trial=20, errors=10)
        assert self.routed() == {"law": None, "next": None}
        assert self.events() == [("Warning", "AdapterRolledBack")]
        assert [kinds.uid_of(pod) for pod in bench.pods()] == pods
