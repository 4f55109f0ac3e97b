"""The prefill pods' own steps: in the revisions of the pods that answer."""

from __future__ import annotations

import pytest

from octavo_operator.decide.canary import CanaryState
from octavo_operator.decide.plan import Target
from octavo_operator.decide.prefill import plan_prefill, wanted_prefill
from octavo_operator.decide.rollout import RevisionGroup, RolloutStep
from octavo_operator.spec.prefill import PrefillSpec
from octavo_operator.spec.traffic import CanarySpec, CanaryStep, RolloutSpec

TWO = PrefillSpec(secret="kv", replicas=2)
CANARY = RolloutSpec(
    strategy="Canary", max_surge=1, max_unavailable=0, canary=CanarySpec(steps=(CanaryStep(50),))
)
TRIAL = CanaryState(stable="old", revision="new")
REJECTED = CanaryState(stable="old", rejected="new")


def serving(revision: str, replicas: int) -> RevisionGroup:
    return RevisionGroup(revision, replicas, replicas, replicas)


def step(
    *groups: RevisionGroup,
    spec: PrefillSpec | None = TWO,
    answering: int = 3,
    rollout: RolloutSpec | None = None,
    state: CanaryState | None = None,
) -> RolloutStep:
    rollout = rollout or RolloutSpec(max_surge=1, max_unavailable=0)
    return plan_prefill(spec, Target("new", answering, rollout), groups, state or CanaryState())


def test_there_are_as_many_as_the_spec_says_whatever_answers():
    assert step().targets == {"new": 2}
    assert step(answering=9).targets == {"new": 2}
    assert step(serving("new", 2)).is_done


@pytest.mark.parametrize(
    ("spec", "answering", "wanted"), [(TWO, 3, 2), (TWO, 0, 0), (None, 3, None)]
)
def test_none_is_wanted_where_nothing_answers(
    spec: PrefillSpec | None, answering: int, wanted: int | None
):
    assert wanted_prefill(spec, Target("new", answering)) == wanted


def test_they_sleep_with_the_pods_that_answer():
    assert step(serving("new", 2), answering=0).targets == {"new": 0}


def test_another_revision_follows_within_its_own_surge():
    first = step(serving("old", 2))
    assert first.targets == {"new": 1}
    assert first.waiting_for == "2 of 2 prefill replicas of revision new to become routable"
    assert step(serving("old", 2), serving("new", 1)).targets == {"old": 1}
    assert step(serving("new", 2), RevisionGroup("old", 0)).vanished == ("old",)


def test_all_leave_that_the_spec_does_not_name_any_more():
    assert step(serving("old", 2), spec=None).targets == {"old": 0}
    gone = step(RevisionGroup("old", 0), spec=None)
    assert gone.vanished == ("old",)
    assert step(spec=None).is_done


def test_they_stay_while_the_rollout_that_ends_them_has_to_wait():
    """For those of other LLMDeployments: pods of the old revision answer until then."""
    assert step(serving("new", 2), serving("older", 1), spec=None).targets == {"older": 0}
    assert step(serving("new", 2), spec=None, answering=0).targets == {"new": 0}


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
        kept = step(serving("old", 2), spec=None, rollout=CANARY, state=TRIAL)
        assert (kept.targets, kept.vanished) == ({}, ())

    @pytest.mark.parametrize("spec", [TWO, None])
    def test_a_rejected_one_leaves(self, spec: PrefillSpec | None):
        left = step(serving("old", 2), serving("new", 1), spec=spec, rollout=CANARY, state=REJECTED)
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
