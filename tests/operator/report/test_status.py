"""Conditions: five facts that say what is, why, and since when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo_operator.decide.autoscale import Scaling
from octavo_operator.decide.canary import CanaryState
from octavo_operator.decide.rollout import RevisionReplica
from octavo_operator.reasons import Reason
from octavo_operator.report.faults import Fault
from octavo_operator.report.status import (
    Facts,
    StatusCondition,
    merge_conditions,
    prefill_scaling_from_status,
    refused,
    rollout_from_status,
    rollout_to_status,
    scaling_from_status,
    summarize,
)

READY = RevisionReplica("1", "a", ready=True, routable=True)
FACTS = Facts(
    generation=3, revision="a", wanted=2, least_serving=2, is_done=True,
    replicas=(READY, replace(READY, id="2")),
)  # fmt: skip
OOM = Fault(Reason.OUT_OF_MEMORY, "used too much", "pod p")


def reported(facts: Facts) -> dict[str, tuple[str, str]]:
    status = summarize(facts, {}, "now")
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def test_all_is_well():
    assert reported(FACTS) == {
        "Accepted": ("True", "Accepted"),
        "ModelReady": ("True", "ModelLoaded"),
        "Progressing": ("False", "Complete"),
        "Degraded": ("False", "AsExpected"),
        "Ready": ("True", "Serving"),
    }


@pytest.mark.parametrize(
    ("change", "condition", "expected"),
    [
        ({"replicas": (READY,)}, "Ready", ("True", "FewerReplicas")),
        ({"replicas": (READY,), "faults": (OOM,)}, "Ready", ("True", "OutOfMemory")),
        ({"replicas": (), "faults": (OOM,)}, "Ready", ("False", "OutOfMemory")),
        ({"faults": (OOM,)}, "Ready", ("True", "Serving")),
        ({"faults": (OOM,)}, "Degraded", ("True", "OutOfMemory")),
        ({"wanted": 0, "is_suspended": True}, "Ready", ("False", "Suspended")),
        ({"wanted": 0}, "Ready", ("False", "ScaledToZero")),
        (
            {"replicas": (), "scaling": Scaling(1, "Woken: waiting requests: 3", "t")},
            "Ready", ("False", "Waking"),
        ),
        ({"is_done": False}, "Progressing", ("True", "Scaling")),
        ({"is_done": False, "canary": CanaryState("z")}, "Progressing", ("True", "RollingOut")),
        (
            {"is_done": False, "canary": CanaryState("z", "a")},
            "Progressing", ("True", "CanaryRunning"),
        ),
        ({"canary": CanaryState("z", rejected="a")}, "Progressing", ("False", "CanaryRejected")),
        (
            {"is_done": False, "stalled_s": 900.0},
            "Progressing", ("False", "ProgressDeadlineExceeded"),
        ),
        (
            {"is_done": False, "stalled_s": 900.0},
            "Degraded", ("True", "ProgressDeadlineExceeded"),
        ),
        (
            {"replicas": (), "faults": (Fault(Reason.MODEL_NOT_FOUND, "404"),)},
            "ModelReady", ("False", "ModelNotFound"),
        ),
    ],
)  # fmt: skip
def test_each_condition(change, condition, expected):
    assert reported(replace(FACTS, **change))[condition] == expected


def test_the_time_moves_with_the_status_and_not_with_the_words():
    first = merge_conditions([StatusCondition("Ready", "False", Reason.STARTING, "a")], {}, 1, "t1")
    previous = {"conditions": first}
    words = [StatusCondition("Ready", "False", Reason.OUT_OF_MEMORY, "b")]
    second = merge_conditions(words, previous, 2, "t2")
    assert second[0]["lastTransitionTime"] == "t1"
    assert second[0]["observedGeneration"] == 2
    flip = [StatusCondition("Ready", "True", Reason.SERVING, "c")]
    assert merge_conditions(flip, {"conditions": second}, 2, "t3")[0]["lastTransitionTime"] == "t3"


def test_a_refusal_keeps_what_was_known():
    before = summarize(FACTS, {}, "t1")
    after = refused(4, Reason.SPEC_INVALID, "spec.x is wrong", before, "t2")
    found = {c["type"]: (c["status"], c["reason"]) for c in after["conditions"]}
    assert found["Accepted"] == ("False", "SpecInvalid")
    assert found["Ready"] == ("True", "Serving")
    assert after["routableReplicas"] == 2
    assert after["observedGeneration"] == 4
    assert [c["type"] for c in after["conditions"]] == [
        "Accepted", "ModelReady", "Progressing", "Degraded", "Ready",
    ]  # fmt: skip


def test_what_must_survive_a_restart_is_read_back():
    state = CanaryState("a", "b", 1, 17.5, "", "m")
    assert rollout_from_status({"rollout": rollout_to_status(state, 50)}) == state
    scaling = Scaling(0, "ScaledToZero: idle", "t")
    prefill = Scaling(3, "ScaledUp: 20000 queued tokens; the target is 8192 per replica", "t")
    facts = replace(FACTS, scaling=scaling, wanted_prefill=3, prefill_scaling=prefill)
    status = summarize(facts, {}, "now")
    assert scaling_from_status(status) == scaling
    assert prefill_scaling_from_status(status) == prefill


@pytest.mark.parametrize("junk", [None, 7, [], {"step": -1}, {"step": "x", "stable": None}])
def test_an_edited_status_breaks_nothing(junk):
    assert rollout_from_status({"rollout": junk}) == CanaryState()
    assert scaling_from_status({"autoscaling": junk}) is None
    assert prefill_scaling_from_status({"prefill": junk}) is None
    assert prefill_scaling_from_status({"prefill": {"autoscaling": junk}}) is None
    merge_conditions([], {"conditions": junk}, 1, "t")


def test_long_stories_are_cut_to_what_the_schema_takes():
    fault = Fault(Reason.OBJECT_REFUSED, "x" * 100_000, "pod p")
    status = summarize(replace(FACTS, faults=(fault,)), {}, "now")
    assert max(len(c["message"]) for c in status["conditions"]) <= 1024
