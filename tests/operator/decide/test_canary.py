"""A canary walks its steps, waits for evidence, and is taken back for good when it is worse."""

from __future__ import annotations

import json

import pytest

from octavo_engine.protocol.state import TTFT_BOUNDS_S, RevisionState
from octavo_operator.decide import canary
from octavo_operator.decide.canary import CanaryState, Sample
from octavo_operator.decide.rollout import RolloutLimits
from octavo_operator.objects import kinds
from octavo_operator.spec.traffic import Analysis, CanarySpec, CanaryStep
from tests.fakes.operator import OperatorBench, make_state

RULES = CanarySpec(steps=(CanaryStep(10, 60.0), CanaryStep(50, 60.0)), analysis=Analysis())
SPEC = {
    "strategy": "Canary",
    "canary": {
        "steps": [{"weight": 10, "pause": "60s"}, {"weight": 50, "pause": "60s"}],
        "analysis": {"minRequests": 20},
    },
}


def sample(requests: int, errors: int = 0, ttft_s: float = 0.1, itl_s: float = 0.01) -> Sample:
    buckets = (*(requests if ttft_s <= bound else 0 for bound in TTFT_BOUNDS_S), requests)
    return Sample(
        requests, errors, ttft_s * requests, requests, itl_s * requests, requests, buckets
    )


class TestJudge:
    @pytest.mark.parametrize(
        ("trial", "action", "reason"),
        [
            (sample(49), "hold", "CanaryWaitingForTraffic"),
            (sample(200), "advance", "CanaryHealthy"),
            (sample(200, errors=5), "reject", "CanaryErrorRate"),
            (sample(200, errors=3), "advance", "CanaryHealthy"),
            (sample(200, ttft_s=1.0), "reject", "CanarySlow"),
            (sample(200, itl_s=0.02), "reject", "CanarySlow"),
            (sample(200, itl_s=0.014), "advance", "CanaryHealthy"),
        ],
    )
    def test_against_a_healthy_stable_revision(self, trial, action, reason):
        verdict = canary.judge(Analysis(), sample(1000), trial)
        assert (verdict.action, verdict.reason) == (action, reason)

    def test_errors_that_all_revisions_have_are_not_its_fault(self):
        verdict = canary.judge(Analysis(), sample(1000, errors=100), sample(100, errors=11))
        assert verdict.action == "advance"

    def test_the_message_says_by_how_much(self):
        verdict = canary.judge(Analysis(), sample(1000), sample(100, errors=10))
        assert verdict.message == ("10.0% of 100 requests failed; the stable revision had 0.0%")

    def test_a_stable_revision_without_traffic_compares_errors_only(self):
        assert canary.judge(Analysis(), Sample(), sample(100, ttft_s=9.0)).action == "advance"

    def test_milliseconds_that_nobody_notices_do_not_count(self):
        verdict = canary.judge(Analysis(), sample(100, itl_s=0.001), sample(100, itl_s=0.004))
        assert verdict.action == "advance"


class TestWalk:
    def test_a_step_lasts_from_when_its_replicas_are_there(self):
        good = canary.CanaryVerdict("advance", "CanaryHealthy", "")
        state = canary.begin(CanaryState(stable="a"), "b")
        state = canary.advance(state, RULES, good, 100.0, is_in_place=False)
        assert (state.step, state.step_started_at) == (0, 0.0)
        state = canary.advance(state, RULES, good, 500.0, is_in_place=True)
        assert (state.step, state.step_started_at) == (0, 500.0)
        state = canary.advance(state, RULES, good, 559.0, is_in_place=True)
        assert state.step == 0
        state = canary.advance(state, RULES, good, 560.0, is_in_place=True)
        assert (state.step, state.step_started_at) == (1, 0.0)

    def test_without_a_judgement_it_stays(self):
        hold = canary.CanaryVerdict("hold", "", "")
        state = CanaryState("a", "b", 0, 1.0)
        assert canary.advance(state, RULES, hold, 1e9, is_in_place=True) == state

    @pytest.mark.parametrize(
        ("replicas", "step", "expected"),
        [
            (10, 0, {"a": 9, "b": 1}),
            (10, 1, {"a": 5, "b": 5}),
            (1, 0, {"a": 1, "b": 1}),
            (4, 0, {"a": 4, "b": 1}),
            (10, 2, {"b": 10}),
        ],
    )
    def test_the_stable_ones_keep_what_their_traffic_needs(self, replicas, step, expected):
        state = CanaryState("a", "b", step)
        assert canary.shares(RolloutLimits(replicas), RULES, state) == expected

    def test_without_surge_the_canary_takes_a_place(self):
        state = CanaryState("a", "b", 0)
        limits = RolloutLimits(4, max_surge=0, max_unavailable=1)
        assert canary.shares(limits, RULES, state) == {"a": 3, "b": 1}


class TestStory:
    """Through the reconciler, with a router that counts."""

    def begun(self) -> OperatorBench:
        bench = OperatorBench()
        bench.create(replicas=2, rollout=SPEC)
        bench.settle()
        self.stable = bench.deployment()["status"]["rollout"]["stable"]
        bench.demand.expect(["router-0"])
        bench.edit(engine={"maxNumSeqs": 7})
        self.bench = bench
        self.counts: dict[str, tuple[int, int]] = {}
        self.report()
        bench.settle(rounds=20)
        self.trial = bench.deployment()["status"]["rollout"]["revision"]
        self.count()
        return bench

    def report(self) -> None:
        ready = tuple(p["metadata"]["uid"] for p in self.bench.cluster.all(canary_pods()))
        revisions = tuple(
            RevisionState(name, requests=n, errors=e) for name, (n, e) in self.counts.items()
        )
        self.bench.demand.learn("router-0", make_state(ready=ready, revisions=revisions))

    def count(self, **more: tuple[int, int]) -> None:
        for name, (requests, errors) in more.items():
            n, e = self.counts.get(name, (0, 0))
            self.counts[name] = (n + requests, e + errors)
        self.settle()

    def settle(self) -> None:
        for _ in range(12):
            self.report()
            self.bench.reconcile()
            self.bench.workloads.sync()
            self.bench.workloads.make_all_ready()
        self.report()
        self.bench.reconcile()

    def weights(self) -> dict[str, int]:
        service = self.bench.cluster.one(kinds.SERVICE, "default", "smollm2")
        annotation = kinds.annotations_of(service)["octavo.dev/routing"]
        weights: dict[str, int] = json.loads(annotation).get("weights", {})
        return weights

    def test_a_good_one_gets_all_the_traffic_in_the_end(self):
        bench = self.begun()
        assert self.weights() == {self.stable: 90, self.trial: 10}
        assert bench.engines() == {self.stable: 2, self.trial: 1}
        bench.clock.advance(61)
        self.count(**{self.stable: (900, 0), self.trial: (100, 0)})
        assert self.weights() == {self.stable: 50, self.trial: 50}
        self.count()
        bench.clock.advance(61)
        self.count(**{self.stable: (500, 0), self.trial: (500, 0)})
        assert self.weights() == {}
        assert bench.engines() == {self.trial: 2}
        assert bench.deployment()["status"]["rollout"] == {"stable": self.trial}

    def test_a_bad_one_is_taken_back_with_the_reason_and_not_tried_again(self):
        bench = self.begun()
        self.count(**{self.stable: (900, 0), self.trial: (100, 40)})
        assert bench.engines() == {self.stable: 2}
        assert self.weights() == {}
        status, reason, message = bench.conditions()["Progressing"]
        assert (status, reason) == ("False", "CanaryRejected")
        assert message.startswith("CanaryErrorRate: 40.0% of 100 requests failed")
        assert bench.conditions()["Ready"][0] == "True"
        assert bench.conditions()["Degraded"][:2] == ("True", "CanaryRejected")
        restarted = OperatorBench(bench.cluster, clock=bench.clock)
        restarted.settle()
        assert restarted.engines() == {self.stable: 2}

    def test_the_first_change_is_judged_also_before_the_first_rollout_has_ended(self):
        bench = OperatorBench()
        bench.create(replicas=2, rollout=SPEC)
        bench.reconcile()
        bench.workloads.sync()
        bench.workloads.make_ready(bench.pods()[0])  # the other one has no place yet
        bench.reconcile()
        bench.workloads.update_all()
        (first,) = bench.engines()
        bench.edit(engine={"maxNumSeqs": 7})
        bench.reconcile()
        rollout = bench.deployment()["status"]["rollout"]
        assert rollout["stable"] == first
        assert rollout["revision"] not in ("", first)
        assert bench.engines() == {first: 2, rollout["revision"]: 1}

    def test_a_change_is_judged_also_after_the_status_was_lost(self):
        """As a backup leaves it that restores no status."""
        bench = OperatorBench()
        bench.create(replicas=2, rollout=SPEC)
        bench.settle()
        (first,) = bench.engines()
        bench.cluster.merge(kinds.LLM_DEPLOYMENT, "default", "smollm2", {"status": None})
        bench.edit(engine={"maxNumSeqs": 7})
        bench.settle()
        rollout = bench.deployment()["status"]["rollout"]
        assert rollout["stable"] == first
        assert bench.engines() == {first: 2, rollout["revision"]: 1}

    @pytest.mark.parametrize("is_rejected", [True, False])
    def test_a_time_without_replicas_promotes_nobody(self, is_rejected):
        bench = self.begun()
        if is_rejected:
            self.count(**{self.stable: (900, 0), self.trial: (100, 40)})
        bench.edit(suspend=True)
        self.settle()
        assert not any(bench.engines().values())
        bench.edit(suspend=False)
        self.settle()
        expected = {self.stable: 2} if is_rejected else {self.stable: 2, self.trial: 1}
        assert bench.engines() == expected
        rollout = bench.deployment()["status"]["rollout"]
        assert rollout["stable"] == self.stable
        assert rollout["rejected" if is_rejected else "revision"] == self.trial

    def test_after_a_restart_it_goes_on_from_its_step(self):
        bench = self.begun()
        bench.clock.advance(61)
        self.count(**{self.stable: (900, 0), self.trial: (100, 0)})
        self.bench = OperatorBench(bench.cluster, clock=bench.clock)
        self.bench.demand.expect(["router-0"])
        self.settle()
        assert self.bench.deployment()["status"]["rollout"]["step"] == 1
        assert self.weights() == {self.stable: 50, self.trial: 50}

    def test_a_third_revision_takes_the_place_of_the_one_on_trial(self):
        bench = self.begun()
        bench.edit(engine={"maxNumSeqs": 9})
        self.settle()
        rollout = bench.deployment()["status"]["rollout"]
        assert rollout["revision"] not in (self.trial, self.stable)
        assert bench.engines() == {self.stable: 2, rollout["revision"]: 1}

    def test_a_revert_calls_the_trial_off(self):
        bench = self.begun()
        bench.edit(engine={"maxNumSeqs": None})
        self.settle()
        assert bench.engines() == {self.stable: 2}
        assert bench.deployment()["status"]["rollout"] == {"stable": self.stable}


def canary_pods():
    return kinds.POD
