"""When the readiness gate of an engine pod opens and closes."""

from __future__ import annotations

import pytest

from octavo_operator.decide import readiness_gate
from octavo_operator.decide.observed import gate_state
from octavo_operator.decide.readiness_gate import Holders
from octavo_operator.objects import kinds
from tests.fakes.operator import OperatorBench, make_state, running_operator


def pod(ready: str = "True", routable: str = "") -> kinds.Object:
    conditions = [{"type": "ContainersReady", "status": ready}]
    if routable:
        conditions.append({"type": "octavo.dev/Routable", "status": routable})
    return {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"readinessGates": [{"conditionType": "octavo.dev/Routable"}]},
        "status": {"conditions": conditions},
    }


@pytest.mark.parametrize(
    ("holders", "waited_s", "is_open"),
    [
        (Holders(0, 0, 0, is_known=False), 99.0, None),  # nobody has looked for routers yet
        (Holders(0, 0, 0, is_known=True), 0.0, True),  # there is none to wait for
        (Holders(3, 3, 3, is_known=True), 0.0, True),
        (Holders(2, 2, 3, is_known=True), 29.0, None),  # one is silent
        (Holders(2, 2, 3, is_known=True), 30.0, True),
        (Holders(1, 1, 2, is_known=True), 30.0, True),
        (Holders(1, 1, 3, is_known=True), 30.0, None),  # fewer than half
        (Holders(2, 3, 3, is_known=True), 99.0, None),  # one tells, and has not got it
        (Holders(0, 0, 1, is_known=True), 99.0, None),
    ],
)
def test_a_silent_router_is_waited_for_only_so_long(holders, waited_s, is_open):
    found = readiness_gate.decide(gate_state(pod()), holders, waited_s)
    assert (None if found is None else found.is_open) is is_open


def test_it_closes_where_the_engine_restarts_in_place():
    everywhere = Holders(1, 1, 1, is_known=True)
    assert readiness_gate.decide(gate_state(pod("True", "True")), everywhere, 0.0) is None
    closed = readiness_gate.decide(gate_state(pod("False", "True")), everywhere, 0.0)
    assert closed is not None
    assert (closed.is_open, closed.reason) == (False, "EngineNotReady")
    assert readiness_gate.decide(gate_state(pod("False", "False")), everywhere, 0.0) is None
    leaving = pod("False", "True")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert readiness_gate.decide(gate_state(leaving), everywhere, 0.0) is None


def test_one_ready_router_that_nobody_reaches_does_not_block_a_rollout():
    bench = running_operator()
    bench.demand.expect(["router-0", "unreachable"])
    bench.edit(engine={"maxNumSeqs": 7})
    (old,) = bench.engines()
    for _ in range(30):
        uids = tuple(kinds.uid_of(found) for found in bench.pods())
        bench.demand.learn("router-0", make_state(ready=uids))
        bench.reconcile()
        bench.workloads.sync()
        bench.workloads.make_all_ready()
        bench.clock.advance(5.0)
    assert old not in bench.engines()
    assert list(bench.engines().values()) == [2]


def test_after_a_restart_in_place_routers_have_to_take_the_engine_anew():
    bench = running_operator(replicas=1)
    (found,) = bench.pods()
    uid = kinds.uid_of(found)
    bench.demand.expect(["router-0"])
    bench.demand.learn("router-0", make_state(ready=(uid,)))
    bench.workloads.set_condition(found, "ContainersReady", "False")
    bench.workloads.update_all()
    bench.reconcile()
    bench.demand.learn("router-0", make_state())  # it has lost its stream
    bench.workloads.make_all_ready()
    bench.reconcile()
    bench.workloads.update_all()
    assert bench.num_ready() == 0
    bench.demand.learn("router-0", make_state(ready=(uid,)))
    bench.settle()
    assert bench.num_ready() == 1


def test_without_a_quorum_nothing_opens():
    bench = OperatorBench()
    bench.demand.expect(["router-0", "router-1", "router-2"])
    bench.create(replicas=1)
    bench.reconcile()
    bench.workloads.sync()
    for _ in range(20):
        uids = tuple(kinds.uid_of(found) for found in bench.pods())
        bench.demand.learn("router-0", make_state(ready=uids))
        bench.workloads.make_all_ready()
        bench.reconcile()
        bench.clock.advance(5.0)
    assert bench.num_ready() == 0
