"""Prefill pods follow what they have to do, whatever the pods that answer do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo_engine.protocol.state import EndpointState, PoolState, State
from octavo_operator.objects import kinds
from tests.fakes.operator import KEY, OperatorBench, running_operator

SCALED = {
    "secretRef": {"name": "kv"},
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 5,
        "targets": {"queuedTokens": 1000},
        "behavior": {"scaleDown": {"window": "30s", "step": 1}},
    },
}


def running(**spec: Any) -> OperatorBench:
    bench = running_operator(**{"prefill": SCALED, **spec})
    bench.demand.expect(["router-0"])
    return bench


def pods_of(bench: OperatorBench, component: str) -> list[dict[str, Any]]:
    return [
        pod
        for pod in bench.pods()
        if kinds.labels_of(pod)["app.kubernetes.io/component"] == component
    ]


def numbers(bench: OperatorBench) -> tuple[int, int]:
    """Pods that answer, and prefill pods."""
    return len(pods_of(bench, "engine")), len(pods_of(bench, "prefill"))


def report(bench: OperatorBench, *, prefill: int = 0, answering: int = 0, held: int = 0) -> None:
    """A router's: prompt tokens that are left to compute on the pods of each side together."""
    endpoints = []
    for side, tokens in (("prefill", prefill), ("engine", answering)):
        pods = pods_of(bench, side)
        endpoints += [
            EndpointState(
                kinds.uid_of(pod), "default/smollm2", "", "http://e", "ready",
                queued_tokens=tokens // len(pods), in_flight=number,
            )
            for number, pod in enumerate(pods)
        ]  # fmt: skip
    pools = [PoolState("default/smollm2", held=held, last_request_age_s=0.0)]
    bench.demand.learn(
        "router-0", State(epoch="e", replica="router-0", pools=pools, endpoints=endpoints)
    )


def decision(bench: OperatorBench) -> dict[str, Any]:
    found: dict[str, Any] = bench.deployment()["status"]["prefill"]["autoscaling"]
    return found


def later(bench: OperatorBench, seconds: float, **load: int) -> None:
    """Settled every five seconds under a load."""
    for _ in range(round(seconds / 5.0)):
        bench.clock.advance(5.0)
        report(bench, **load)
        bench.settle()


def restarted(bench: OperatorBench) -> OperatorBench:
    again = OperatorBench(bench.cluster, clock=bench.clock)
    again.demand.expect(["router-0"])
    return again


def test_prompts_that_wait_there_make_more_of_them_and_of_no_others():
    bench = running()
    assert numbers(bench) == (2, 1)
    (before,) = bench.engines()
    later(bench, 5, prefill=2600)
    assert numbers(bench) == (2, 2)  # doubled: the step of one minute
    later(bench, 70, prefill=2600)
    assert numbers(bench) == (2, 3)
    assert (decision(bench)["replicas"], decision(bench)["reason"]) == (
        3, "ScaledUp: 2600 queued tokens; the target is 1000 per replica",
    )  # fmt: skip
    assert list(bench.engines()) == [before]
    assert "autoscaling" not in bench.deployment()["status"]
    assert bench.conditions()["Progressing"][:2] == ("False", "Complete")


def test_each_side_follows_its_own_load():
    bench = running(autoscaling={"maxReplicas": 6, "targets": {"queuedTokens": 1000}})
    later(bench, 5, prefill=2000, answering=4000)
    assert numbers(bench) == (4, 2)
    status = bench.deployment()["status"]
    assert (status["autoscaling"]["replicas"], decision(bench)["replicas"]) == (4, 2)


def test_fewer_prompts_take_the_idlest_of_them_one_a_minute_after_the_window():
    bench = running(prefill={**SCALED, "replicas": 3})
    uids = [kinds.uid_of(pod) for pod in pods_of(bench, "prefill")]
    later(bench, 25, prefill=0)
    assert numbers(bench) == (2, 3)
    later(bench, 15, prefill=0)
    assert [kinds.uid_of(pod) for pod in pods_of(bench, "prefill")] == uids[1:]
    later(bench, 65, prefill=0)
    assert numbers(bench) == (2, 1)
    later(bench, 120, prefill=0)
    assert numbers(bench) == (2, 1)


def test_a_restart_keeps_the_number_with_and_without_routers():
    bench = running()
    later(bench, 70, prefill=9000)
    number = numbers(bench)[1]
    assert number > 2
    bench.cluster.calls.clear()
    again = restarted(bench)
    for _ in range(4):
        again.reconcile()
        again.clock.advance(5.0)
    assert bench.cluster.calls == []
    assert numbers(again) == (2, number)
    later(again, 5, prefill=100)  # its window begins anew
    assert numbers(again) == (2, number)


def test_a_decision_is_stored_before_it_is_carried_out():
    """An operator that is killed between the two is followed by one that knows of it."""
    bench = running()
    bench.clock.advance(5.0)
    report(bench, prefill=2000)
    bench.cluster.calls.clear()
    bench.reconcile()
    written = [(call.verb, call.kind.name) for call in bench.cluster.calls]
    stored = next(at for at, (_, kind) in enumerate(written) if kind == kinds.LLM_DEPLOYMENT.name)
    scaled = next(at for at, (_, kind) in enumerate(written) if kind == kinds.DEPLOYMENT.name)
    assert stored < scaled
    assert decision(bench)["replicas"] == 2


def test_a_decision_about_a_spec_that_was_edited_meanwhile_counts_for_nothing():
    bench = running()
    bench.clock.advance(5.0)
    report(bench, prefill=2000)
    bench.edit(routing={"holdTimeout": "90s"})  # the watch has not reported it yet
    outcome = asyncio.run(bench.reconciler.reconcile(KEY))
    assert outcome.again_after_s == 0.0
    assert decision(bench)["replicas"] == 1
    bench.reconcile()
    assert decision(bench)["replicas"] == 2  # within the step of this minute


def test_none_runs_while_nothing_answers_and_then_they_start_anew():
    bench = running(prefill={**SCALED, "replicas": 2})
    later(bench, 5, prefill=4000)
    assert numbers(bench) == (2, 4)
    bench.edit(suspend=True)
    bench.settle()
    assert numbers(bench) == (0, 0)
    assert decision(bench)["replicas"] == 0
    assert decision(bench)["reason"].startswith("NothingAnswers: prefill pods run while")
    bench.cluster.calls.clear()
    bench.clock.advance(600.0)
    bench.reconcile()
    restarted(bench).reconcile()
    assert bench.cluster.calls == []
    bench.edit(suspend=False)
    bench.settle()
    assert numbers(bench) == (2, 2)


def test_they_sleep_and_wake_with_the_pods_that_answer():
    to_zero = {"maxReplicas": 2, "scaleToZero": {"after": "1m"}}
    bench = running(replicas=1, autoscaling=to_zero)
    bench.demand.learn(
        "router-0",
        State("e", "router-0", [PoolState("default/smollm2", last_request_age_s=90.0)], []),
    )
    bench.settle()
    assert numbers(bench) == (0, 0)
    report(bench, held=1)
    bench.settle()
    assert numbers(bench) == (1, 1)


def test_while_none_of_them_is_ready_the_number_stays():
    """The pods that answer compute all prompts then: an empty queue is no lack of demand."""
    bench = running(prefill={**SCALED, "replicas": 3})
    pools = [PoolState("default/smollm2", last_request_age_s=0.0)]
    for _ in range(20):
        bench.clock.advance(5.0)
        bench.demand.learn("router-0", State("e", "router-0", pools, []))
        bench.settle()
    assert numbers(bench) == (2, 3)


@pytest.mark.parametrize("strategy", ["Rolling", "Recreate"])
def test_a_new_revision_has_as_many_as_the_old_one_had(strategy: str):
    bench = running(rollout={"strategy": strategy})
    later(bench, 70, prefill=3000)
    assert numbers(bench) == (2, 3)
    (old,) = bench.engines()
    bench.edit(engine={"maxNumSeqs": 7})
    for _ in range(12):
        if all(numbers(bench)):
            report(bench, prefill=3000)
        bench.settle()
    assert old not in bench.engines()
    assert numbers(bench) == (2, 3)


def test_bounds_and_targets_change_without_a_new_revision():
    bench = running()
    (before,) = bench.engines()
    bench.edit(prefill={"autoscaling": {"minReplicas": 4}})
    bench.settle()
    assert numbers(bench) == (2, 4)
    assert decision(bench)["reason"] == "OutOfBounds: minReplicas is 4, maxReplicas 5"
    bench.edit(prefill={"autoscaling": None, "replicas": 2})
    bench.settle()
    assert numbers(bench) == (2, 2)
    assert "autoscaling" not in bench.deployment()["status"]["prefill"]
    assert list(bench.engines()) == [before]


def test_a_canary_shares_the_number_that_was_decided():
    canary = {"strategy": "Canary", "canary": {"steps": [{"weight": 50}]}}
    bench = running(rollout=canary)
    later(bench, 70, prefill=4000)
    assert numbers(bench)[1] == 4
    bench.edit(engine={"maxNumSeqs": 7})
    later(bench, 15, prefill=4000)
    targets = [
        body["spec"]["replicas"]
        for body in bench.engine_deployments()
        if kinds.labels_of(body)["app.kubernetes.io/component"] == "prefill"
    ]
    assert sorted(targets) == [2, 2]


def test_it_is_looked_at_again_every_five_seconds():
    bench = running()
    assert bench.reconcile(KEY).again_after_s == 5.0
