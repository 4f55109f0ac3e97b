"""Which engines compute prompts and which answer: the decision from numbers alone.

Red when: a side is changed while every target is met, or again within seconds; more prompts go to a
side than it can compute; nobody is left that answers; a side has fewer engines than its limit.
"""

from __future__ import annotations

from random import Random

import pytest

from octavo_engine.protocol.sides import (
    FULL,
    HOLD_S,
    EngineLoad,
    EngineReport,
    SideDemand,
    SideHistory,
    SideLimits,
    SideTargets,
    decide_sides,
    follow_sides,
    foreseen,
    measure,
)

TIGHT = SideTargets(first_token_s=0.5, token_s=0.01)


def engines(computing: int, answering: int, *, running=15, step_s=0.011, queued=0):
    return [EngineLoad(f"p{i}", True, 0, queued, 4e-5, 0.0) for i in range(computing)] + [
        EngineLoad(f"d{i}", False, running, 0, 4e-5, step_s) for i in range(answering)
    ]


def decide(loads, tokens_per_s=24_000.0, targets=TIGHT, since_change_s=60.0):
    demand = SideDemand(tokens_per_s, 1200.0)
    return decide_sides(loads, demand, targets, since_change_s=since_change_s)


def test_prompts_leave_answers_that_they_make_late():
    change = decide(engines(0, 4))
    assert change is not None
    assert change.to_prompts == ("d0", "d1") and not change.to_answers
    assert change.reason.startswith("2 instead of 0 of 4 engines compute prompts: first token ")


def test_a_side_that_cannot_keep_up_is_enlarged():
    change = decide(engines(1, 3, queued=60_000), tokens_per_s=30_000.0)
    assert change is not None and len(change.to_prompts) == 1


def test_engines_come_back_when_prompts_are_few():
    loads = engines(2, 2, running=60, step_s=0.0099)
    change = decide(loads, tokens_per_s=1000.0)
    assert change is not None
    assert change.to_answers and not change.to_prompts


def test_where_the_first_token_is_what_counts_all_engines_compute():
    targets = SideTargets(first_token_s=0.06, token_s=1.0)
    change = decide(engines(1, 3), targets=targets)
    assert change is not None and change.to_answers == ("p0",)


def test_nothing_changes_while_the_targets_are_met():
    assert decide(engines(0, 4), targets=SideTargets(5.0, 0.5)) is None


def test_nothing_changes_again_within_seconds():
    assert decide(engines(0, 4), since_change_s=HOLD_S - 0.1) is None
    assert decide(engines(0, 4), since_change_s=HOLD_S) is not None


def test_a_change_is_not_taken_back_by_what_it_brings():
    """What is foreseen after a change, taken as measured, asks for no other one."""
    chance = Random(1)
    for _ in range(2000):
        count = chance.randint(2, 8)
        now = chance.randrange(count)
        loads = engines(
            now, count - now, running=chance.randint(1, 60), step_s=chance.uniform(0.005, 0.05)
        )
        demand = SideDemand(chance.uniform(0, 25_000 * count), chance.uniform(300, 8000))
        targets = SideTargets(chance.uniform(0.05, 5.0), chance.uniform(0.006, 0.1))
        change = decide_sides(loads, demand, targets, since_change_s=60.0)
        if change is None:
            continue
        k = now + len(change.to_prompts) - len(change.to_answers)
        assert 0 <= k < count
        before, after = foreseen(loads, demand)[now], foreseen(loads, demand)[k]
        assert after.over(targets) < before.over(targets)
        # No side is chosen that its prompts would fill, unless the one at hand is full as well.
        work = demand.tokens_per_s * 4e-5
        assert work / (k or count) <= FULL or work / (now or count) > FULL


def test_one_engine_answers_whatever_happens():
    change = decide(engines(2, 0), since_change_s=0.0)
    assert change is not None and change.to_answers == ("p0",)
    assert decide(engines(0, 1)) is None
    assert decide([]) is None


@pytest.mark.parametrize(
    ("limits", "now", "count"),
    [(SideLimits(1, 1), 0, 4), (SideLimits(0, 3), 3, 4), (SideLimits(2, 3), 3, 4)],
    ids=str,
)
def test_limits_are_kept_at_once_and_whatever_the_load(limits, now, count):
    loads = engines(now, count - now)
    change = decide_sides(
        loads, SideDemand(0.0, 0.0), SideTargets(9.0, 9.0), limits, since_change_s=0.0
    )
    assert change is not None
    least, most = limits.bounds(count)
    assert least <= now + len(change.to_prompts) - len(change.to_answers) <= most


def test_a_limit_ends_where_the_other_one_begins():
    assert SideLimits(2, 3).bounds(4) == (1, 1)  # answers come first
    assert SideLimits(1, 1).bounds(1) == (0, 0)
    assert SideLimits(0, 5).bounds(3) == (0, 0)
    change = decide_sides(
        engines(2, 2), SideDemand(24_000.0, 1200.0), TIGHT, SideLimits(2, 3), since_change_s=60.0
    )
    assert change is not None and change.reason == "2 of 4 engines answer; the fewest are 3"


def test_the_best_number_is_looked_for_within_the_limits():
    loads = engines(2, 2, running=60, step_s=0.0099)
    few = SideDemand(1000.0, 1200.0)
    free = decide_sides(loads, few, TIGHT, since_change_s=60.0)
    assert free is not None and free.to_answers
    assert decide_sides(loads, few, TIGHT, SideLimits(2, 1), since_change_s=60.0) is None


def reports(second, *, computing=0, running=15, step_s=0.011):
    return [
        EngineReport(f"e{i}", i < computing, running, 0, 6000 * second, 4e-5, step_s)
        for i in range(4)
    ]


def test_what_came_is_what_was_computed_and_what_is_queued_more():
    history = SideHistory(0.0)
    for second in range(30):
        history = measure(history, reports(second), float(second))
    assert history.came / history.weight == pytest.approx(24_000.0)
    again = measure(history, reports(40), 29.0)
    assert again == history  # the same moment says nothing new
    back = measure(history, reports(0), 30.0)  # they started anew
    assert 0.0 <= back.came < history.came


def test_steps_of_engines_that_compute_prompts_say_nothing_of_answers():
    history = measure(SideHistory(0.0), reports(1, computing=2), 1.0)
    assert sorted(history.step_s) == ["e2", "e3"]
    idle = measure(history, reports(2, computing=2, running=0, step_s=0.0), 2.0)
    assert idle.step_s == history.step_s


def test_a_change_that_is_returned_counts_as_made():
    history, change = SideHistory(0.0), None
    for second in range(12):
        history, found = follow_sides(
            history, reports(second), 1200.0, TIGHT, SideLimits(), float(second)
        )
        if found is not None:
            assert change is None or history.changed_at - change >= HOLD_S
            change = history.changed_at
    assert change is not None
