"""Counts of experts by stages: whose are there, and one list of all layers."""

from __future__ import annotations

import threading

from octavo_engine.executor.messages import ExpertCounts
from octavo_engine.executor.stage_counts import StageCounts


def test_each_layer_is_of_the_stage_that_has_it() -> None:
    counts = StageCounts(3)
    counts.put(2, ExpertCounts(1, [[], [], [3, 4]]))
    assert not counts.are_complete
    counts.put(1, ExpertCounts(1, [[1, 2]]))
    assert counts.are_complete
    assert counts.with_own([[], [], [], [], [5, 6]]) == [[1, 2], [], [3, 4], [], [5, 6]]


def test_layers_without_experts_have_no_counts() -> None:
    counts = StageCounts(2)
    counts.put(1, ExpertCounts(1, []))
    assert counts.with_own([]) == []


def test_an_answer_counts_for_its_question_and_those_before() -> None:
    counts = StageCounts(3)
    counts.put(1, ExpertCounts(5, [[1]]))
    counts.put(2, ExpertCounts(4, [[2]]))
    assert counts.arrived(4, 0.0)
    assert not counts.arrived(5, 0.0)
    waiting = threading.Timer(0.01, counts.put, (2, ExpertCounts(5, [[2]])))
    waiting.start()
    assert counts.arrived(5, 30.0)
    waiting.join()
