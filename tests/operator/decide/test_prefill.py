"""The prefill pods' own steps: in the revisions of the pods that answer."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_operator.decide.autoscale import (
    LoadSignals,
    ReplicaCount,
    ScaleHistory,
    ScaleInputs,
    Scaling,
)
from octavo_operator.decide.canary import CanaryState
from octavo_operator.decide.plan import Target
from octavo_operator.decide.prefill import plan_prefill, wanted_prefill
from octavo_operator.decide.rollout import RevisionGroup, RolloutStep
from octavo_operator.spec.traffic import CanarySpec, CanaryStep, RolloutSpec
from tests.fakes.deployments import make_deployment

TWO = 2
SCALED = {"secretRef": {"name": "kv"}, "replicas": 2, "autoscaling": {"maxReplicas": 6}}
CANARY = RolloutSpec(
    strategy="Canary", max_surge=1, max_unavailable=0, canary=CanarySpec(steps=(CanaryStep(50),))
)
TRIAL = CanaryState(stable="old", revision="new")
REJECTED = CanaryState(stable="old", rejected="new")


def serving(revision: str, replicas: int) -> RevisionGroup:
    return RevisionGroup(revision, replicas, replicas, replicas)


def step(
    *groups: RevisionGroup,
    wanted: int | None = TWO,
    answering: int = 3,
    rollout: RolloutSpec | None = None,
    state: CanaryState | None = None,
) -> RolloutStep:
    rollout = rollout or RolloutSpec(max_surge=1, max_unavailable=0)
    if not answering and wanted:
        wanted = 0
    return plan_prefill(wanted, Target("new", answering, rollout), groups, state or CanaryState())


def test_there_are_as_many_as_the_spec_says_whatever_answers():
    assert step().targets == {"new": 2}
    assert step(answering=9).targets == {"new": 2}
    assert step(serving("new", 2)).is_done


def count(
    prefill: dict[str, Any] | None,
    answering: int = 3,
    last: Scaling | None = None,
    *,
    is_decided: bool = False,
    **signals: Any,
) -> ReplicaCount | None:
    """With windows that have been watched for long."""
    return wanted_prefill(
        make_deployment({} if prefill is None else {"prefill": prefill}),
        answering,
        ScaleInputs(
            last,
            ScaleHistory(since=0.0),
            LoadSignals(**{"is_known": True, "is_complete": True, "serving": 2, **signals}),
            now=10_000.0,
            now_text="now",
            is_decided=is_decided,
        ),
    )


def test_a_fixed_number_is_that_of_the_spec_and_none_where_nothing_answers():
    fixed = {"secretRef": {"name": "kv"}, "replicas": 2}
    assert count(fixed, queued_tokens=90_000) == (2, None, ScaleHistory())
    assert count(fixed, answering=0) == (0, None, ScaleHistory())
    assert count(None) is None


class TestAutoscaling:
    @pytest.mark.parametrize(
        ("queued_tokens", "wanted"),
        [(0, 1), (8_000, 1), (16_000, 2), (20_000, 3), (90_000, 4), (None, 2)],
    )
    def test_they_follow_the_prompt_tokens_that_are_left_to_compute(
        self, queued_tokens: int | None, wanted: int
    ):
        found = count(SCALED, last=Scaling(2, "", ""), queued_tokens=queued_tokens)
        assert found is not None
        assert found.replicas == wanted

    def test_the_number_of_prompts_may_be_the_target(self):
        by_prompts = {**SCALED, "autoscaling": {"maxReplicas": 6, "targets": {"inFlight": 4}}}
        found = count(by_prompts, last=Scaling(2, "", ""), in_flight=12, queued_tokens=90_000)
        assert found is not None
        assert found.scaling == Scaling(
            3, "ScaledUp: 12 requests in flight; the target is 4 per replica", "now"
        )

    def test_the_first_decision_starts_at_the_replicas_of_the_spec_within_the_bounds(self):
        for replicas, start in ((2, 2), (0, 1), (9, 6)):
            found = count({**SCALED, "replicas": replicas}, is_known=False)
            assert found is not None
            assert found.replicas == start

    def test_the_bounds_hold_without_any_signal(self):
        bounded = {**SCALED, "autoscaling": {"minReplicas": 3, "maxReplicas": 4}}
        for last, wanted in ((1, 3), (9, 4)):
            found = count(bounded, last=Scaling(last, "", ""), is_known=False)
            assert found is not None
            assert found.replicas == wanted

    def test_none_runs_where_nothing_answers_which_is_decided_once(self):
        slept = count(SCALED, 0, Scaling(4, "ScaledUp: …", "then"), queued_tokens=90_000)
        assert slept is not None
        assert slept.scaling == Scaling(
            0, "NothingAnswers: prefill pods run while there are pods that answer", "now"
        )
        asleep = Scaling(0, "NothingAnswers: …", "then")
        assert count(SCALED, 0, asleep) == (0, asleep, ScaleHistory())

    def test_those_that_are_woken_start_anew(self):
        woken = count(SCALED, 3, Scaling(0, "NothingAnswers: …", "then"))
        assert woken is not None
        assert woken.replicas == 2

    def test_a_reconcile_decides_once(self):
        last = Scaling(2, "WithinTarget: …", "then")
        found = count(SCALED, last=last, queued_tokens=90_000, is_decided=True)
        assert found is not None
        assert found.scaling == last


def test_they_sleep_with_the_pods_that_answer():
    assert step(serving("new", 2), answering=0).targets == {"new": 0}


def test_another_revision_follows_within_its_own_surge():
    first = step(serving("old", 2))
    assert first.targets == {"new": 1}
    assert first.waiting_for == "2 of 2 prefill replicas of revision new to become routable"
    assert step(serving("old", 2), serving("new", 1)).targets == {"old": 1}
    assert step(serving("new", 2), RevisionGroup("old", 0)).vanished == ("old",)


def test_all_leave_that_the_spec_does_not_name_any_more():
    assert step(serving("old", 2), wanted=None).targets == {"old": 0}
    gone = step(RevisionGroup("old", 0), wanted=None)
    assert gone.vanished == ("old",)
    assert step(wanted=None).is_done


def test_they_stay_while_the_rollout_that_ends_them_has_to_wait():
    """For those of other LLMDeployments: pods of the old revision answer until then."""
    assert step(serving("new", 2), serving("older", 1), wanted=None).targets == {"older": 0}
    assert step(serving("new", 2), wanted=None, answering=0).targets == {"new": 0}


def test_recreated_ones_come_after_the_old_have_left():
    recreate = RolloutSpec(strategy="Recreate")
    assert step(serving("old", 2), rollout=recreate).targets == {"old": 0}
    assert step(RevisionGroup("old", 0, 0, 1), rollout=recreate).targets == {}
    assert step(rollout=recreate).targets == {"new": 2}


class TestCanary:
    def test_both_revisions_have_their_share(self):
        first = step(serving("old", 2), rollout=CANARY, state=TRIAL)
        assert first.targets == {"new": 1}
        then = step(serving("old", 2), serving("new", 1), rollout=CANARY, state=TRIAL)
        assert then.targets == {"old": 1}

    def test_a_trial_that_brings_prefill_has_it_whole(self):
        assert step(rollout=CANARY, state=TRIAL).targets == {"new": 2}

    def test_a_trial_that_ends_prefill_leaves_the_stable_ones(self):
        kept = step(serving("old", 2), wanted=None, rollout=CANARY, state=TRIAL)
        assert (kept.targets, kept.vanished) == ({}, ())

    @pytest.mark.parametrize("wanted", [TWO, None])
    def test_a_rejected_one_leaves(self, wanted: int | None):
        groups = (serving("old", 2), serving("new", 1))
        left = step(*groups, wanted=wanted, rollout=CANARY, state=REJECTED)
        assert left.targets == {"new": 0}

    def test_a_rejected_one_leaves_where_the_stable_one_has_none(self):
        assert step(serving("new", 2), rollout=CANARY, state=REJECTED).targets == {"new": 0}

    def test_the_stable_ones_can_be_woken(self):
        slept = step(serving("old", 1), serving("new", 1), answering=0, rollout=CANARY, state=TRIAL)
        assert slept.targets == {"new": 0, "old": 0}
        empty = [RevisionGroup("old", 0), RevisionGroup("new", 0)]
        assert step(*empty, answering=0, rollout=CANARY, state=TRIAL).vanished == ()
        assert step(*empty, rollout=CANARY, state=TRIAL).targets == {"old": 1, "new": 1}

    def test_after_the_last_step_the_trial_has_all(self):
        done = CanaryState(stable="old", revision="new", step=1)
        assert step(serving("old", 1), serving("new", 1), rollout=CANARY, state=done).targets == {
            "new": 2
        }
        assert step(serving("new", 2), rollout=CANARY, state=CanaryState(stable="new")).is_done
