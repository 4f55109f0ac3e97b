"""Clocks that are wrong by an hour: the same end state, and no serving replica lost on the way."""

from __future__ import annotations

import pytest

from tests.fakes.operator import OperatorBench, running_operator
from tests.operator.reconcile.test_repeated_edits import REPLICAS, children, edited

HOUR_S = 3600.0


@pytest.mark.parametrize("error_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("step", range(4))
def test_a_clock_that_jumps_in_the_midst_of_a_rollout_changes_nothing(error_s: float, step: int):
    reference = running_operator(replicas=REPLICAS)
    reference.edit(**edited(7))
    reference.settle()
    bench = running_operator(replicas=REPLICAS)
    bench.edit(**edited(7))
    clock = bench.clock
    for number in range(8):
        if number == step:
            bench.reconciler._epoch_clock = lambda: clock.now + error_s
        bench.reconcile()
        assert bench.num_ready() >= REPLICAS, number
        bench.workloads.sync()
        bench.workloads.make_all_ready()
        bench.clock.advance(1.0)
    bench.settle()
    assert children(bench) == children(reference)
    assert bench.conditions()["Ready"][:2] == ("True", "Serving")


@pytest.mark.parametrize("error_s", [-HOUR_S, HOUR_S])
def test_an_operator_on_a_machine_with_another_time_takes_over(error_s: float):
    bench = running_operator(replicas=REPLICAS)
    wanted = children(bench)
    again = OperatorBench(bench.cluster, clock=bench.clock)
    again.reconciler._epoch_clock = lambda: bench.clock.now + error_s
    again.settle()
    assert children(again) == wanted
    before = len(again.cluster.events)
    for _ in range(5):
        again.clock.advance(60.0)
        again.settle()
    assert len(again.cluster.events) == before, "it writes what it wrote"
