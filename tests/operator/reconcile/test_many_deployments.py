"""Hundreds of LLMDeployments: what an operator costs that has nothing to do, and one change."""

from __future__ import annotations

import logging
import time

import pytest

from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.objects import kinds
from octavo_operator.process import RunSettings
from tests.fakes.effort import is_full
from tests.fakes.operator import OperatorBench, make_deployment

log = logging.getLogger(__name__)
COUNT, REPLICAS = (500, 10) if is_full() else (40, 4)
RESYNC_S = RunSettings(namespace="n", identity="i").resync_s
SHARE_OF_A_CORE = 0.02
CHANGE_S = 2.0
ROUNDS = 40


def platform() -> tuple[OperatorBench, list[DeploymentKey]]:
    bench = OperatorBench()
    keys = [DeploymentKey("default", f"model-{number}") for number in range(COUNT)]
    for key in keys:
        bench.cluster.put(make_deployment(name=key.name, replicas=REPLICAS))
    for _ in range(ROUNDS):  # all together: a look at all pods after each one alone takes minutes
        before = len(bench.cluster.events)
        for key in keys:
            bench.reconcile(key)
        bench.workloads.sync()
        bench.workloads.make_all_ready()
        if len(bench.cluster.events) == before:
            return bench, keys
    raise AssertionError(f"not settled after {ROUNDS} rounds: {bench.cluster.calls[-10:]}")


@pytest.mark.slow
def test_at_rest_nothing_is_written_and_little_is_computed_and_a_change_is_quick():
    bench, keys = platform()
    writes, began_at = len(bench.cluster.events), time.process_time()
    for key in keys:
        bench.reconcile(key)
    seconds = (time.process_time() - began_at) / COUNT
    assert len(bench.cluster.events) == writes
    # As if there were 500 of them: each is looked at once in a resync.
    share = seconds * 500 / RESYNC_S
    assert share <= SHARE_OF_A_CORE, f"{1000 * seconds:.2f} ms each"
    log.info("%.2f ms each, %.2f %% of a core for 500", 1000 * seconds, 100 * share)

    key = keys[COUNT // 2]
    bench.cluster.merge(kinds.LLM_DEPLOYMENT, *key, {"spec": {"engine": {"maxNumSeqs": 9}}})
    began_at = time.process_time()
    bench.reconcile(key)
    seconds = time.process_time() - began_at
    log.info("%.1f ms for the first writes of a change", 1000 * seconds)
    assert len(bench.cluster.events) > writes + 1
    assert seconds <= CHANGE_S
