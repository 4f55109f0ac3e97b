"""A spec that cannot be carried out freezes nothing: the last accepted one goes on."""

from __future__ import annotations

import json

import pytest

from octavo_operator.decide.accepted_spec import accepted_of
from octavo_operator.objects import kinds
from tests.fakes.operator import OperatorBench, make_state, running_operator

BAD = {"engine": {"executor": "ray"}}
TO_ZERO = {"maxReplicas": 4, "scaleToZero": {"after": "60s"}}


def refused(bench: OperatorBench) -> str:
    """The message of condition Accepted, which is False."""
    status, _, message = bench.conditions()["Accepted"]
    assert status == "False"
    return message


def test_a_refused_spec_leaves_the_last_accepted_one_running():
    bench = running_operator()
    before = bench.engines()
    bench.edit(replicas=5, **BAD)
    bench.settle()
    assert bench.engines() == before
    assert refused(bench).endswith("The spec of generation 1 is carried out.")
    assert bench.conditions()["Degraded"][:2] == ("True", "Unsupported")
    assert bench.conditions()["Ready"][0] == "True"
    assert bench.deployment()["status"]["observedGeneration"] == 2
    bench.edit(engine={"executor": None})
    bench.settle()
    assert list(bench.engines().values()) == [5]
    assert bench.conditions()["Degraded"][0] == "False"


def test_a_replacement_becomes_routable_under_a_refused_spec():
    bench = running_operator()
    bench.edit(**BAD)
    bench.settle()
    bench.workloads.kill(bench.pods()[0])
    bench.workloads.sync()
    bench.settle()
    assert bench.num_ready() == 2


def test_a_model_at_zero_wakes_under_a_refused_spec_also_after_a_restart():
    bench = running_operator(replicas=1, autoscaling=TO_ZERO)
    bench.demand.expect(["router-0"])
    bench.demand.learn("router-0", make_state(last_request_age_s=900.0))
    bench.settle()
    assert bench.pods() == []
    bench.edit(**BAD)
    again = OperatorBench(bench.cluster, clock=bench.clock)
    again.demand.expect(["router-0"])
    again.demand.learn("router-0", make_state(held=1))
    again.reconcile()
    again.workloads.sync()
    assert len(again.pods()) == 1
    assert "spec.engine.executor" in refused(again)


def test_a_refused_spec_is_reported_once_and_costs_nothing_then():
    bench = running_operator()
    bench.edit(**BAD)
    bench.settle()
    bench.cluster.calls.clear()
    bench.reconcile()
    assert bench.cluster.calls == []
    (event,) = (e for e in bench.cluster.all(kinds.EVENT) if e["type"] == "Warning")
    assert event["reason"] == "Unsupported"


def test_what_was_never_accepted_runs_nothing():
    bench = OperatorBench()
    bench.create(**BAD)
    bench.reconcile()
    assert bench.cluster.all(kinds.DEPLOYMENT) == []
    assert bench.conditions()["Ready"][0] == "False"


@pytest.mark.parametrize(
    "junk",
    ["a string", {}, {"generation": 1}, {"generation": 1, "spec": "{"}, {"spec": "{}"},
     {"generation": 1, "spec": "[]"}],
)  # fmt: skip
def test_an_edited_status_is_no_accepted_spec(junk):
    assert accepted_of({"status": {"accepted": junk}}) is None


def test_gates_open_even_where_no_spec_can_be_carried_out():
    """Rolled back to a version that knows neither the written spec nor the one accepted before."""
    bench = running_operator()
    newer = json.dumps({"model": {"uri": "demo://smollm2"}, "engine": {"executor": "warp"}})
    bench.edit(engine={"executor": "warp"})
    accepted = {"generation": 2, "spec": newer}
    bench.cluster.merge(
        kinds.LLM_DEPLOYMENT, "default", "smollm2", {"status": {"accepted": accepted}}
    )
    bench.workloads.kill(bench.pods()[0])
    bench.workloads.sync()
    bench.settle()
    assert bench.num_ready() == 2
    assert bench.conditions()["Accepted"][:2] == ("False", "UnsupportedVersion")


class TestVersions:
    """An operator of version N beside a schema of N+1, as during every upgrade and rollback."""

    def test_a_field_of_a_newer_version_is_left_out_and_harmless(self):
        variable = {"name": "A", "value": "b"}
        bench = running_operator(engine={"env": [variable]})
        before = bench.engines(), [kinds.name_of(pod) for pod in bench.pods()]
        bench.edit(
            speculation={"tokens": 4},
            engine={"warmUp": True, "env": [{**variable, "from": "x"}]},
            rollout={"budget": 1},
        )
        bench.settle()
        assert (bench.engines(), [kinds.name_of(pod) for pod in bench.pods()]) == before
        status, reason, message = bench.conditions()["Accepted"]
        assert (status, reason) == ("True", "Accepted")
        for field in (
            "spec.engine.warmUp", "spec.engine.env[0].from", "spec.rollout.budget",
            "spec.speculation",
        ):  # fmt: skip
            assert field in message
        assert "Upgrade the operator" in message

    def test_forth_and_back_replaces_no_pod_and_stops_nothing(self):
        """N, then N+1 (which writes what only it knows), then N again."""
        bench = running_operator(replicas=2)
        pods = [kinds.name_of(pod) for pod in bench.pods()]
        bench.edit(engine={"warmUp": True})  # by N+1 and its schema
        status = {"status": {"forecast": {"replicas": 9}, "rollout": {"phase": "of the moon"}}}
        bench.cluster.merge(kinds.LLM_DEPLOYMENT, "default", "smollm2", status)
        older = OperatorBench(bench.cluster, clock=bench.clock)
        older.settle()
        assert [kinds.name_of(pod) for pod in older.pods()] == pods
        older.edit(replicas=3)
        older.workloads.kill(older.pods()[0])
        older.settle()
        assert older.num_ready() == 3
        older.edit(engine={"warmUp": None})  # pruned by the schema of N, which is back too
        older.settle()
        assert older.conditions()["Accepted"] == ("True", "Accepted", "The spec is valid.")
        assert len(set(pods) & {kinds.name_of(pod) for pod in older.pods()}) == 1

    def test_a_value_of_a_newer_version_is_refused_and_the_last_accepted_spec_goes_on(self):
        bench = running_operator()
        before = bench.engines()
        bench.edit(engine={"device": "quantum"})
        bench.settle()
        assert bench.engines() == before
        assert bench.conditions()["Accepted"][:2] == ("False", "UnsupportedVersion")


@pytest.mark.parametrize(
    "text",
    ["x" * 60_000, "\N{GRINNING FACE}" * 15_000, "\n" * 30_000, "<" * 10_000, "\u2028" * 10_000],
    ids=["ascii", "four bytes", "escapes", "escapes of HTML", "escapes of JavaScript"],
)
def test_a_spec_that_is_too_long_to_keep_is_carried_out_all_the_same(text):
    """The status would not fit beside it, and would never be written: etcd counts bytes."""
    template = {"metadata": {"annotations": {f"a{n}": text for n in range(5)}}}
    bench = running_operator(podTemplate=template)
    assert "accepted" not in bench.deployment()["status"]
    assert bench.conditions()["Ready"][0] == "True"


@pytest.mark.parametrize("text", ["x" * 50_000, "\N{GRINNING FACE}" * 12_000])
def test_a_long_spec_that_fits_is_kept(text):
    template = {"metadata": {"annotations": {f"a{n}": text for n in range(5)}}}
    bench = running_operator(podTemplate=template)
    assert text in bench.deployment()["status"]["accepted"]["spec"]
