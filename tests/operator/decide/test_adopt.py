"""An upgrade of the operator replaces no engine that serves, whatever is new in its template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.desired import pod, revision
from octavo_operator.desired.deployment import TEMPLATE_ANNOTATION
from octavo_operator.objects import kinds
from octavo_operator.settings import Images, OperatorSettings
from tests.fakes.operator import OperatorBench, make_deployment, running_operator

if TYPE_CHECKING:
    from tests.fakes.cluster import FakeCluster

OTHER_SETTINGS = {
    "pull policy": OperatorSettings(images=Images(pull_policy="Always")),
    "preStop": OperatorSettings(pre_stop_s=7),
    "readiness gate": OperatorSettings(readiness_gate=False),
    "network policy": OperatorSettings(network_policy=False),
}
OLD_NAME = "zzzzzzzzzz"  # as an earlier version's hash might be


def template(bench: OperatorBench) -> dict[str, Any]:
    (deployment,) = bench.engine_deployments()
    found: dict[str, Any] = deployment["spec"]["template"]
    return found


def uids(bench: OperatorBench) -> list[str]:
    return [kinds.uid_of(pod) for pod in bench.pods()]


def upgraded(bench: OperatorBench, settings: OperatorSettings | None = None) -> OperatorBench:
    """Another version of the operator takes over, and has nothing left to do."""
    successor = OperatorBench(bench.cluster, clock=bench.clock, settings=settings)
    successor.settle()
    return successor


def assert_stayed(bench: OperatorBench, after: OperatorBench) -> None:
    assert after.engines() == bench.engines()
    assert uids(after) == uids(bench)
    assert after.conditions()["Progressing"][1] == "Complete"


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_other_settings_of_the_operator_replace_no_engine(name: str):
    bench = running_operator()
    before, pods = template(bench), uids(bench)
    after = upgraded(bench, OTHER_SETTINGS[name])
    assert template(after) == before
    assert uids(after) == pods
    after.cluster.calls.clear()
    after.clock.advance(3600)
    after.reconcile()
    assert after.cluster.writes == [], "what has been adopted is not written again"


def test_other_probes_and_variables_replace_no_engine(monkeypatch: pytest.MonkeyPatch):
    bench = running_operator()
    before, pods = template(bench), uids(bench)
    original = pod._engine

    def other(*given: Any) -> dict[str, Any]:
        made = original(*given)
        made["livenessProbe"] = {**made["livenessProbe"], "failureThreshold": 30}
        made["env"] = [*made["env"], {"name": "NEW_DEFAULT", "value": "1"}]
        return made

    monkeypatch.setattr(pod, "_engine", other)
    after = upgraded(bench)
    assert template(after) == before
    assert uids(after) == pods
    # What the user asks for next comes with all that is new.
    after.edit(engine={"maxNumSeqs": 7})
    after.settle()
    assert "NEW_DEFAULT" in json.dumps(template(after))
    monkeypatch.setattr(pod, "_engine", original)
    again = upgraded(after)
    assert "NEW_DEFAULT" in json.dumps(template(again)), "nor does the way back replace any"


def test_a_template_by_which_nothing_runs_is_mended():
    """Else a setting that keeps pods from starting could not be corrected."""
    bench = OperatorBench(settings=OperatorSettings(images=Images(pull_policy="Never")))
    bench.create()
    bench.reconcile()
    after = OperatorBench(bench.cluster, clock=bench.clock)
    after.reconcile()
    (container,) = template(after)["spec"]["containers"]
    assert container["imagePullPolicy"] == "IfNotPresent"


def test_what_others_changed_in_a_template_of_this_version_is_put_right():
    bench = running_operator()
    (deployment,) = bench.engine_deployments()
    before = template(bench)
    changed = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}}
    bench.cluster.merge(kinds.DEPLOYMENT, "default", kinds.name_of(deployment), changed)
    bench.settle()
    assert template(bench) == before


def test_a_higher_epoch_replaces_all(monkeypatch: pytest.MonkeyPatch):
    bench = running_operator()
    before = bench.engines()
    monkeypatch.setattr(revision, "TEMPLATE_EPOCH", revision.TEMPLATE_EPOCH + 1)
    assert upgraded(bench).engines().keys() != before.keys()


def test_another_default_image_replaces_those_that_name_none():
    settings = OperatorSettings(images=Images(cpu="registry.example.com/octavo/engine-cpu:2"))
    bench = running_operator()
    before = bench.engines()
    assert upgraded(bench, settings).engines().keys() != before.keys()
    bench = running_operator(engine={"image": "mine:1"})
    before = bench.engines()
    assert upgraded(bench, settings).engines().keys() == before.keys()


class TestOfAnEarlierVersion:
    """It hashed whole templates, and left no mark of that."""

    def test_its_revision_is_adopted_under_its_name(self):
        bench = of_an_earlier_version(running_operator())
        pods = uids(bench)
        after = upgraded(bench)
        assert after.engines() == {OLD_NAME: 2}
        assert uids(after) == pods
        assert after.conditions()["Progressing"][1] == "Complete"
        assert after.deployment()["status"]["rollout"]["stable"] == OLD_NAME
        # From now on it is known by a mark, and no edit of other fields takes it for another.
        after.edit(replicas=3, routing={"holdTimeout": "5s"})
        after.settle()
        assert after.engines() == {OLD_NAME: 3}
        again = upgraded(after)
        assert again.engines() == {OLD_NAME: 3}

    def test_an_edit_that_it_has_not_seen_is_rolled_out(self):
        bench = of_an_earlier_version(running_operator())
        bench.edit(engine={"maxNumSeqs": 7})
        assert OLD_NAME not in upgraded(bench).engines()

    def test_another_default_image_replaces_it(self):
        bench = of_an_earlier_version(running_operator())
        settings = OperatorSettings(images=Images(cpu="registry.example.com/octavo/engine-cpu:2"))
        assert OLD_NAME not in upgraded(bench, settings).engines()

    def test_a_spec_that_it_had_refused_is_not_taken_for_what_runs(self):
        bench = running_operator()
        bench.edit(engine={"executor": "ray"})
        bench.settle()
        bench = of_an_earlier_version(bench)
        bench.cluster.merge(
            kinds.LLM_DEPLOYMENT, "default", "smollm2",
            {"spec": {"engine": {"executor": "uni", "maxNumSeqs": 7}}},
        )  # fmt: skip
        stored = bench.cluster._stored[kinds.LLM_DEPLOYMENT, "default", "smollm2"]
        stored.body["metadata"]["generation"] = 2  # as if this version could carry it out
        assert OLD_NAME not in upgraded(bench).engines()


def of_an_earlier_version(bench: OperatorBench) -> OperatorBench:
    """The same cluster, with another name for the revision and without this version's marks."""
    (name,) = bench.engines()
    cluster: FakeCluster = bench.cluster
    for key, stored in [*cluster._stored.items()]:
        stored.body = json.loads(json.dumps(stored.body).replace(name, OLD_NAME))
        if key[0] == kinds.DEPLOYMENT:
            del stored.body["metadata"]["annotations"][TEMPLATE_ANNOTATION]
        del cluster._stored[key]
        cluster._stored[(key[0], key[1], key[2].replace(name, OLD_NAME))] = stored
    return OperatorBench(cluster, clock=bench.clock)


class TestRolloutsAtOnce:
    NAMES = ("a", "b", "c")

    def fleet(self, settings: OperatorSettings) -> OperatorBench:
        bench = OperatorBench(settings=settings)
        for name in self.NAMES:
            bench.cluster.put(make_deployment(name))
        for name in self.NAMES:
            bench.settle(DeploymentKey("default", name))
        return bench

    def look(self, bench: OperatorBench) -> None:
        for name in self.NAMES:
            bench.reconcile(DeploymentKey("default", name))

    def changing(self, bench: OperatorBench) -> set[str]:
        owners = [kinds.labels_of(d)["octavo.dev/deployment"] for d in bench.engine_deployments()]
        return {name for name in owners if owners.count(name) > 1}

    def test_no_more_than_the_setting_says_change_their_revision(self):
        images = Images(cpu="registry.example.com/octavo/engine-cpu:2")
        first = self.fleet(OperatorSettings())
        bench = OperatorBench(
            first.cluster,
            clock=first.clock,
            settings=OperatorSettings(images=images, max_rollouts=1),
        )
        self.look(bench)
        assert self.changing(bench) == {"a"}
        waiting = bench.cluster.one(kinds.LLM_DEPLOYMENT, "default", "b")["status"]
        (progressing,) = (c for c in waiting["conditions"] if c["type"] == "Progressing")
        assert progressing["status"] == "True"
        assert (
            "a rollout of another LLMDeployment to end (at most 1 at a time)"
            in (progressing["message"])
        )
        assert bench.reconcile(DeploymentKey("default", "b")).again_after_s == 5.0
        again = OperatorBench(
            first.cluster,
            clock=first.clock,
            settings=OperatorSettings(images=images, max_rollouts=1),
        )
        self.look(again)
        assert self.changing(again) == {"a"}, "a restart changes nothing"
        for name in self.NAMES:
            again.settle(DeploymentKey("default", name))
        for name in self.NAMES:
            again.settle(DeploymentKey("default", name))
        found = {d["spec"]["template"]["spec"]["containers"][0]["image"]
                 for d in again.engine_deployments()}  # fmt: skip
        assert found == {"registry.example.com/octavo/engine-cpu:2"}

    def test_waiting_is_no_fault_however_long(self):
        bench = self.fleet(OperatorSettings(max_rollouts=1))
        for name in self.NAMES:
            bench.cluster.merge(
                kinds.LLM_DEPLOYMENT, "default", name, {"spec": {"engine": {"maxNumSeqs": 7}}}
            )
        for _ in range(3):
            self.look(bench)
            bench.clock.advance(400)
        status = bench.cluster.one(kinds.LLM_DEPLOYMENT, "default", "c")["status"]
        (degraded,) = (c for c in status["conditions"] if c["type"] == "Degraded")
        assert degraded["status"] == "False"

    def test_one_that_gets_nowhere_holds_up_nobody(self):
        bench = self.fleet(OperatorSettings(max_rollouts=1))
        for name in ("a", "b"):
            bench.cluster.merge(
                kinds.LLM_DEPLOYMENT, "default", name, {"spec": {"engine": {"maxNumSeqs": 7}}}
            )
        self.look(bench)
        self.look(bench)
        assert self.changing(bench) == {"a"}
        bench.clock.advance(1000)  # progressDeadline is 900 s
        self.look(bench)
        self.look(bench)
        assert self.changing(bench) == {"a", "b"}

    def test_who_serves_nobody_waits_for_nobody(self):
        bench = self.fleet(OperatorSettings(max_rollouts=1))
        for engine in bench.pods():
            if kinds.labels_of(engine)["octavo.dev/deployment"] == "b":
                bench.workloads.set_condition(engine, "ContainersReady", "False")
                bench.workloads.update_ready(engine)
        for name in ("a", "b"):
            bench.cluster.merge(
                kinds.LLM_DEPLOYMENT, "default", name, {"spec": {"engine": {"maxNumSeqs": 7}}}
            )
        self.look(bench)
        assert self.changing(bench) == {"a", "b"}
