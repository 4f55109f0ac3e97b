"""Agents over four engines find nearly what one engine that forgets nothing would find.

Red when: the router sends a call elsewhere than the calls before it without need, or engines forget
contexts that there is room for.
"""

from itertools import pairwise
from typing import Any

import pytest

from octavo.study.engine_models import engine_models
from octavo.study.judgement import DEFAULT
from octavo.study.simulation import RoutingStudy, Setup
from octavo.study.synthetic import AGENT_CALLS, synthetic

pytestmark = pytest.mark.slow

MODEL = engine_models()["gpu-8b"]
ENOUGH = 150_000  # blocks for every token of the workload


def hits(workload, num_engines, num_blocks):
    setup = Setup(model=MODEL.with_blocks(num_blocks), num_engines=num_engines)
    figures = RoutingStudy(workload, setup).run(DEFAULT)
    assert figures.num_requests == len(workload.arrivals)
    return figures.hit_rate * figures.num_prompt_tokens


def test_four_engines_find_95_percent_of_what_one_without_limits_finds():
    workload = synthetic("agents", 320, seed=2)
    ours = hits(workload, 4, MODEL.sim.kv_blocks)
    all_there_is = hits(workload, 1, ENOUGH)
    num_tokens = sum(arrival.num_prompt_tokens for arrival in workload.arrivals)
    assert all_there_is > 0.9 * num_tokens
    assert ours >= 0.95 * all_there_is


def test_an_agent_makes_43_calls_up_to_140_000_tokens():
    arrivals = synthetic("agents", 600, seed=2).arrivals
    sessions: dict[str, list[Any]] = {}
    for arrival in arrivals:
        if arrival.session:
            sessions.setdefault(arrival.session, []).append(arrival)
    whole = [calls for calls in sessions.values() if len(calls) == AGENT_CALLS]
    assert len(whole) >= 10
    last = sorted(calls[-1].num_prompt_tokens for calls in whole)
    assert 120_000 < last[len(last) // 2] < 165_000
    for calls in whole:
        for before, call in pairwise(calls):
            assert call.prompt[:-1] == (*before.prompt, before.answer)
