"""The default policy keeps its promise: a small version of benchmarks/router/study.py.

Everything here is exact arithmetic in virtual time: a change of these outcomes is a change of the
policy, the scheduler or the prefix cache, never of the machine.
"""

import json
from collections import Counter
from random import Random

import pytest

from octavo.study.engine_models import engine_models
from octavo.study.judgement import BEATEN, DEFAULT, judge_random, judge_sharing
from octavo.study.simulation import RoutingStudy, Setup
from octavo.study.synthetic import synthetic
from octavo.study.trace import read_trace

pytestmark = pytest.mark.slow

MODEL = engine_models()["gpu-8b"].with_blocks(6000)
NUM_ENGINES = 3


def run(workload, policies, load):
    setup = Setup(model=MODEL, num_engines=NUM_ENGINES)
    study = RoutingStudy(workload.at_load(load, MODEL, NUM_ENGINES), setup)
    return [study.run(policy) for policy in policies]


def check(findings):
    missed = [str(finding) for finding in findings if not finding.is_met]
    assert findings
    assert not missed


@pytest.mark.parametrize(("name", "count"), [("multi-turn", 100), ("shared-system", 80)])
def test_it_beats_round_robin_and_least_load_where_prompts_share_prefixes(name, count):
    workload = synthetic(name, count, seed=1)
    check(judge_sharing(name, run(workload, (DEFAULT, *BEATEN), 0.9)))


def test_it_does_so_on_a_recorded_trace(tmp_path):
    # A few users, each of whose prompts grows by a block a turn, in the form that traces have.
    rng = Random(1)
    turns: Counter[int] = Counter()
    lines = []
    for number in range(80):
        user = rng.randrange(12)
        turns[user] += 1
        ids = [1000 * user + i for i in range(1 + turns[user])]
        lines.append(
            {
                "timestamp": 250 * number,
                "input_length": 512 * len(ids) - 100,
                "output_length": 40,
                "hash_ids": ids,
            }
        )
    path = tmp_path / "users.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    check(judge_sharing("trace", run(read_trace(path), (DEFAULT, *BEATEN), 0.8)))


def test_on_random_prompts_it_is_at_most_two_percent_behind_anybody():
    policies = (DEFAULT, *BEATEN, "power-of-two", "consistent-hash", "random")
    check(judge_random("random", run(synthetic("random", 200, seed=1), policies, 0.8)))
