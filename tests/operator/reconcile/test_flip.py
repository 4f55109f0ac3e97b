"""Pods that change sides, over an API server in memory: who follows the label, and what is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.protocol.state import EndpointState, PoolState, State
from octavo_operator.objects import kinds
from tests.fakes.operator import KEY, OperatorBench, running_operator

FLIP = {"targets": {"ttft": "500ms", "tpot": "10ms"}}
PREFILL = {"secretRef": {"name": "kv"}, "flip": FLIP}


def running(prefill: dict[str, Any] | None = None, **spec: Any) -> OperatorBench:
    bench = running_operator(**{"replicas": 3, "prefill": {**PREFILL, **(prefill or {})}, **spec})
    bench.demand.expect(["router-0"])
    return bench


def side_of(pod: dict[str, Any]) -> str:
    return kinds.labels_of(pod).get("octavo.dev/side", "")


def sides(bench: OperatorBench) -> list[str]:
    return sorted(map(side_of, bench.pods()))


def report(bench: OperatorBench, second: float, *, rate: float = 6000.0, queued: int = 0) -> None:
    """By default prompts on each engine, that make its answers late."""
    endpoints = [
        EndpointState(
            kinds.uid_of(pod), "default/smollm2", "", "http://e", "ready",
            running=15, step_s=0.011, computed_tokens=round(rate * second), prompt_token_s=4e-5,
            queued_tokens=queued if side_of(pod) == "prefill" else 0,
        )
        for pod in bench.pods()
    ]  # fmt: skip
    pools = [PoolState("default/smollm2", last_request_age_s=0.0, prompt_tokens=1200.0)]
    bench.demand.learn("router-0", State("e", "router-0", pools, endpoints))


def later(bench: OperatorBench, seconds: int, **load: Any) -> None:
    for _ in range(seconds):
        bench.clock.advance(1.0)
        report(bench, bench.clock() - 1_000_000.0, **load)
        bench.reconcile()


def status(bench: OperatorBench) -> dict[str, Any]:
    found: dict[str, Any] = bench.deployment()["status"]["prefill"]["flip"]
    return found


def flips(bench: OperatorBench) -> list[str]:
    events = [body for body in bench.cluster.all(kinds.EVENT) if body["reason"] == "Flipped"]
    return [str(body.get("note") or body.get("message")) for body in events]


def test_pods_begin_on_the_side_that_they_are_of_and_flip_within_seconds():
    bench = running()
    assert sides(bench) == ["decode", "decode", "decode", "prefill"]
    before = {kinds.uid_of(pod) for pod in bench.pods()}
    later(bench, 8)
    assert sides(bench) == ["decode", "decode", "prefill", "prefill"]
    assert {kinds.uid_of(pod) for pod in bench.pods()} == before  # none was restarted
    found = status(bench)
    assert (found["answering"], found["computing"]) == (2, 2)
    assert found["reason"].startswith("2 instead of 1 of 4 engines compute prompts: first token")
    assert bench.conditions()["Ready"][2] == "3 of 3 replicas serve; 2 of 4 pods compute prompts."
    assert len(flips(bench)) == 1 and found["reason"] in flips(bench)[0]


def test_the_service_follows_the_label_and_no_deployment_is_touched():
    bench = running()
    (service,) = [
        body
        for body in bench.cluster.all(kinds.SERVICE)
        if "octavo.dev/routing" in kinds.annotations_of(body)
    ]
    assert service["spec"]["selector"] == {
        "octavo.dev/deployment": "smollm2", "octavo.dev/side": "decode",
    }  # fmt: skip
    bench.cluster.calls.clear()
    later(bench, 8)
    written = {(call.verb, call.kind.name) for call in bench.cluster.calls if call.is_write}
    assert ("patch", "Pod") in written
    assert not {kind for _, kind in written} & {"Deployment", "Service", "ConfigMap"}


def test_while_pods_of_an_earlier_revision_have_no_label_the_service_goes_by_component():
    bench = running_operator(replicas=2, prefill={"secretRef": {"name": "kv"}})
    assert set(sides(bench)) == {""}
    bench.edit(prefill={"flip": FLIP})
    seen = []
    for _ in range(40):
        bench.reconcile()
        (service,) = [
            body
            for body in bench.cluster.all(kinds.SERVICE)
            if "octavo.dev/routing" in kinds.annotations_of(body)
        ]
        by_side = "octavo.dev/side" in service["spec"]["selector"]
        assert not by_side or "" not in sides(bench)
        seen.append(by_side)
        bench.workloads.sync()
        bench.workloads.make_all_ready()
    assert seen[0] is False and seen[-1] is True


def test_targets_and_limits_change_without_a_new_revision_and_limits_at_once():
    bench = running()
    (before,) = bench.engines()
    later(bench, 2)
    bench.edit(prefill={"flip": {"minPrefill": 3}})
    later(bench, 1)
    assert sides(bench) == ["decode", "prefill", "prefill", "prefill"]
    assert status(bench)["reason"] == "1 of 4 engines compute prompts; the fewest are 3"
    assert list(bench.engines()) == [before]


def test_without_the_field_pods_are_on_their_own_side_again_in_a_new_revision():
    bench = running()
    later(bench, 8)
    bench.edit(prefill={"flip": None})
    for _ in range(12):
        report(bench, 8.0)
        bench.settle()
    assert set(sides(bench)) == {""}
    assert "flip" not in bench.deployment()["status"]["prefill"]


def test_a_restart_keeps_the_sides_and_the_reason_and_measures_anew():
    bench = running()
    later(bench, 8)
    found, were = status(bench), sides(bench)
    again = OperatorBench(bench.cluster, clock=bench.clock)
    again.demand.expect(["router-0"])
    later(again, 3, rate=0.0)
    assert sides(again) == were
    assert status(again) == found


def test_no_pod_flips_while_no_router_reports():
    bench = running(prefill={"flip": {**FLIP, "minPrefill": 3}})
    for _ in range(10):
        bench.clock.advance(1.0)
        bench.reconcile()
    assert sides(bench) == ["decode", "decode", "decode", "prefill"]


def test_each_side_is_scaled_by_the_load_of_the_pods_that_are_on_it():
    scaling = {"maxReplicas": 6, "targets": {"queuedTokens": 1000}}
    bench = running(prefill={"autoscaling": scaling, "flip": {**FLIP, "minPrefill": 2}})
    later(bench, 1, queued=900)
    assert sides(bench).count("prefill") == 2
    later(bench, 5, queued=900)  # 1,800 on both, of which one belongs to the pods that answer
    found = bench.deployment()["status"]["prefill"]["autoscaling"]
    assert found["reason"] == "ScaledUp: 1800 queued tokens; the target is 1000 per replica"
    bench.settle()
    assert sides(bench) == ["decode", "decode", "prefill", "prefill", "prefill"]


def test_it_is_looked_at_again_every_second_where_a_pod_could_flip():
    bench = running()
    assert bench.reconcile(KEY).again_after_s == 1.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"prefill": {**PREFILL, "flip": {}}}, "spec.prefill.flip.targets.ttft is required"),
        (
            {"prefill": {**PREFILL, "flip": {"targets": {"ttft": "1s"}}}},
            "spec.prefill.flip.targets.tpot is required",
        ),
        (
            {"prefill": PREFILL, "autoscaling": {"provider": "hpa", "maxReplicas": 2}},
            "spec.autoscaling.provider must be octavo beside spec.prefill.flip",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(spec: dict[str, Any], message: str):
    bench = OperatorBench()
    bench.create(**spec)
    bench.reconcile()
    assert message in json.dumps(bench.conditions())
