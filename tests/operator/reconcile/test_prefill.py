"""An LLMDeployment with prefill pods, from creation to removal, over an API server in memory."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo_engine.protocol.state import EndpointState, PoolState, State
from octavo_operator.objects import kinds
from tests.fakes.operator import KEY, OperatorBench, make_state, running_operator

PREFILL = {"replicas": 2, "secretRef": {"name": "kv"}}


def sides(bench: OperatorBench) -> dict[tuple[str, str], int]:
    """Replicas asked for, by side and revision."""
    return {
        (
            kinds.labels_of(body)["app.kubernetes.io/component"],
            kinds.labels_of(body)["octavo.dev/revision"],
        ): body["spec"]["replicas"]
        for body in bench.engine_deployments()
    }


def pods_of(bench: OperatorBench, component: str) -> list[dict[str, Any]]:
    return [
        pod
        for pod in bench.pods()
        if kinds.labels_of(pod)["app.kubernetes.io/component"] == component
    ]


def revisions(bench: OperatorBench) -> set[str]:
    return {revision for _, revision in sides(bench)}


def running(**spec: Any) -> OperatorBench:
    return running_operator(**{"prefill": PREFILL, **spec})


def test_both_sides_run_in_one_revision_and_are_counted_apart():
    bench = running()
    (revision,) = revisions(bench)
    assert sides(bench) == {("engine", revision): 2, ("prefill", revision): 2}
    status = bench.deployment()["status"]
    assert (status["replicas"], status["routableReplicas"]) == (2, 2)
    assert status["prefill"] == {
        "replicas": 2, "readyReplicas": 2, "routableReplicas": 2, "updatedReplicas": 2,
    }  # fmt: skip
    assert bench.conditions()["Ready"][2] == (
        "2 of 2 replicas serve, 2 of 2 compute prompts for them."
    )
    assert bench.conditions()["Progressing"][:2] == ("False", "Complete")
    assert [entry["replicas"] for entry in status["revisions"]] == [2]


def test_nothing_is_written_when_nothing_has_changed():
    bench = running()
    assert bench.calls_at_rest() == []


def test_it_serves_without_prefill_pods_and_says_that_it_waits_for_them():
    bench = OperatorBench()
    bench.create(replicas=1, prefill=PREFILL)
    bench.reconcile()
    bench.workloads.sync()
    for pod in pods_of(bench, "engine"):
        bench.workloads.make_ready(pod)
    bench.reconcile()  # opens the gate
    bench.workloads.update_all()
    bench.reconcile()
    assert bench.conditions()["Ready"] == (
        "True", "Serving", "1 of 1 replicas serve, 0 of 2 compute prompts for them.",
    )  # fmt: skip
    status, _, text = bench.conditions()["Progressing"]
    assert status == "True"
    assert "2 of 2 prefill replicas of revision" in text


def test_a_new_revision_replaces_both_sides_and_leaves_nothing_behind():
    bench = running()
    (old,) = revisions(bench)
    bench.edit(engine={"maxNumSeqs": 7})
    bench.settle()
    (new,) = revisions(bench)
    assert new != old
    assert sides(bench) == {("engine", new): 2, ("prefill", new): 2}
    names = {kinds.name_of(body) for body in bench.cluster.all(kinds.CONFIG_MAP)}
    assert names == {f"smollm2-{new}", f"smollm2-{new}-prefill"}


def test_settings_of_the_prefill_pods_alone_replace_both_sides():
    bench = running()
    (old,) = revisions(bench)
    bench.edit(prefill={"maxNumSeqs": 7})
    bench.settle()
    assert old not in revisions(bench)
    assert set(sides(bench).values()) == {2}


def test_their_number_is_their_own():
    bench = running()
    (revision,) = revisions(bench)
    bench.edit(prefill={"replicas": 3}, replicas=1)
    bench.settle()
    assert sides(bench) == {("engine", revision): 1, ("prefill", revision): 3}
    bench.edit(suspend=True)
    bench.settle()
    assert set(sides(bench).values()) == {0}
    bench.edit(suspend=False)
    bench.settle()
    assert sides(bench) == {("engine", revision): 1, ("prefill", revision): 3}


def test_they_come_with_an_edit_and_go_with_one():
    bench = running_operator()
    bench.edit(prefill=PREFILL)
    bench.settle()
    (revision,) = revisions(bench)
    assert sides(bench) == {("engine", revision): 2, ("prefill", revision): 2}
    bench.edit(prefill=None)
    bench.settle()
    (last,) = revisions(bench)
    assert sides(bench) == {("engine", last): 2}
    names = [kinds.name_of(body) for body in bench.cluster.all(kinds.CONFIG_MAP)]
    assert names == [f"smollm2-{last}"]
    assert "prefill" not in bench.deployment()["status"]


def test_each_side_marks_its_own_pods_that_leave():
    bench = running(replicas=3)
    bench.demand.expect(["router-0"])
    uids = {side: [kinds.uid_of(p) for p in pods_of(bench, side)] for side in ("engine", "prefill")}
    busy = {uids["engine"][0]: 4, uids["engine"][1]: 0, uids["engine"][2]: 2}
    busy |= {uids["prefill"][0]: 0, uids["prefill"][1]: 3}
    everyone = tuple(uids["engine"] + uids["prefill"])
    bench.demand.learn("router-0", make_state(ready=everyone, busy=busy))
    bench.edit(replicas=2)
    bench.reconcile()
    bench.edit(prefill={"replicas": 1})  # before the first pod has left
    bench.settle()
    left = {side: [kinds.uid_of(p) for p in pods_of(bench, side)] for side in ("engine", "prefill")}
    assert left == {
        "engine": [uids["engine"][0], uids["engine"][2]],
        "prefill": [uids["prefill"][1]],
    }


@pytest.mark.parametrize("side", ["engine", "prefill"])
def test_only_the_load_of_pods_that_answer_makes_more_of_them(side: str):
    scaling = {"maxReplicas": 4, "targets": {"queuedTokens": 1000}}
    bench = running(replicas=1, autoscaling=scaling)
    bench.demand.expect(["router-0"])
    pool = "default/smollm2"
    endpoints = [
        EndpointState(
            kinds.uid_of(pod), pool, "", "http://e", "ready",
            queued_tokens=9000 if pod in pods_of(bench, side) else 0,
        )
        for pod in bench.pods()
    ]  # fmt: skip
    state = State(epoch="e", replica="router-0", pools=[PoolState(pool)], endpoints=endpoints)
    bench.demand.learn("router-0", state)
    bench.reconcile()
    wanted = bench.deployment()["status"]["autoscaling"]["replicas"]
    assert (wanted > 1) is (side == "engine")


def test_two_sides_are_no_rollout_of_the_fleet():
    bench = running()
    assert bench.world.rolling() == []
    bench.edit(engine={"maxNumSeqs": 7})
    bench.reconcile()
    bench.deliver()
    assert bench.world.rolling() == [KEY]


def test_a_template_of_one_side_is_kept_for_its_own_pods_alone():
    """A correction of the template reaches a side none of whose pods run."""
    bench = running()
    for pod in pods_of(bench, "prefill"):
        bench.workloads.set_condition(pod, "ContainersReady", "False")
        bench.workloads.set_condition(pod, "Ready", "False")
    for body in bench.engine_deployments():
        annotations = {"octavo.dev/template": "older", "octavo.dev/fingerprint": "older"}
        bench.cluster.merge(
            kinds.DEPLOYMENT, "default", kinds.name_of(body), {
                "metadata": {"annotations": annotations},
                "spec": {"template": {"metadata": {"annotations": {"by": "an earlier version"}}}},
            },
        )  # fmt: skip
    bench.cluster.calls.clear()
    bench.reconcile()
    kept = {
        kinds.labels_of(body)["app.kubernetes.io/component"]: kinds.annotations_of(body)[
            "octavo.dev/template"
        ]
        for body in bench.engine_deployments()
    }
    assert kept["engine"] == "older"
    assert kept["prefill"] != "older"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_edits_in_a_row_with_an_operator_that_is_killed_at_every_step_cost_no_replica(seed: int):
    rng = random.Random(seed)
    bench = running_operator(replicas=3)
    before = set(sides(bench))
    edits: list[dict[str, Any]] = [
        {"prefill": PREFILL},
        {"prefill": {"replicas": 3, "maxNumSeqs": 4}},
        {"engine": {"maxNumSeqs": 7}},
        {"prefill": {"replicas": 1}},
        {"prefill": None, "engine": {"maxNumSeqs": None}},
    ]
    for step in range(120):
        if edits and rng.random() < 0.2:
            bench.edit(**edits.pop(0))
        bench = OperatorBench(bench.cluster, clock=bench.clock)  # the earlier one was killed
        bench.reconcile()
        for _ in range(2):
            ready = [pod for pod in pods_of(bench, "engine") if is_ready(pod)]
            assert len(ready) >= 3, step
            bench.workloads.sync()
        if rng.random() < 0.5:
            bench.workloads.make_all_ready()
        bench.clock.advance(1.0)
    assert not edits
    bench.settle()
    assert set(sides(bench)) == before
    assert {kinds.name_of(body) for body in bench.cluster.all(kinds.CONFIG_MAP)} == {
        f"smollm2-{revision}" for _, revision in before
    }


def test_a_rejected_canary_takes_its_prefill_pods_along():
    canary = {"strategy": "Canary", "canary": {"steps": [{"weight": 50}]}}
    bench = running(rollout=canary)
    (stable,) = revisions(bench)
    bench.edit(engine={"maxNumSeqs": 7})
    bench.settle()
    (trial,) = revisions(bench) - {stable}
    assert sides(bench) == {
        ("engine", stable): 1, ("engine", trial): 1,
        ("prefill", stable): 1, ("prefill", trial): 1,
    }  # fmt: skip
    status = bench.deployment()["status"]["rollout"]
    rejected = {"stable": stable, "rejected": trial, "message": "CanarySlow: too slow"}
    assert status["revision"] == trial
    bench.cluster.merge(
        kinds.LLM_DEPLOYMENT, *KEY, {"status": {"rollout": {**dict.fromkeys(status), **rejected}}}
    )
    bench.settle()
    assert sides(bench) == {("engine", stable): 2, ("prefill", stable): 2}
    bench.edit(engine={"maxNumSeqs": None})
    bench.settle()
    assert sides(bench) == {("engine", stable): 2, ("prefill", stable): 2}


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
