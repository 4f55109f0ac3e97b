"""Adapters of specs and of LLMAdapters: what routers are given, and what statuses say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo_engine.protocol.state import AdapterState, EndpointState, PoolState, State
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.objects import kinds
from octavo_operator.report.adapters import FEW_ADAPTERS, RENEW_S
from tests.fakes.operator import KEY, OperatorBench

LAW = {"name": "law", "uri": "hf://org/law"}


def put_adapter(bench: OperatorBench, resource: str, /, **spec: Any) -> None:
    bench.cluster.put(
        {
            "apiVersion": "octavo.dev/v1alpha1",
            "kind": "LLMAdapter",
            "metadata": {
                "name": resource,
                "namespace": "default",
                "creationTimestamp": f"2026-01-01T{bench.clock.now:.0f}",  # later, greater
            },
            "spec": {"deployment": KEY.name, "uri": f"hf://org/{resource}", **spec},
        }
    )
    bench.clock.now += 1.0  # the next one is younger


def started(**spec: Any) -> OperatorBench:
    bench = OperatorBench()
    bench.create(**spec)
    bench.settle()
    return bench


def routed(bench: OperatorBench) -> list[str]:
    """The adapters that routers are given."""
    service = bench.cluster.one(kinds.SERVICE, "default", "smollm2")
    routing = json.loads(service["metadata"]["annotations"]["octavo.dev/routing"])
    return [adapter["name"] for adapter in routing.get("adapters", ())]


def adapter_status(bench: OperatorBench, name: str, namespace: str = "default") -> dict[str, Any]:
    status: dict[str, Any] = bench.cluster.one(kinds.LLM_ADAPTER, namespace, name)["status"]
    return status


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    return {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}


def report(bench: OperatorBench, states: list[AdapterState], *, loaded: dict[int, list[str]]):
    """A router reports: what becomes of each adapter, and which pod (by number) has which."""
    bench.demand.expect(["router-0"])
    endpoints = [
        EndpointState(kinds.uid_of(pod), "default/smollm2", "", "http://x", "ready",
                      adapters=loaded.get(number, []))
        for number, pod in enumerate(bench.pods())
    ]  # fmt: skip
    pool = PoolState("default/smollm2", adapters=states)
    bench.demand.learn("router-0", State("epoch", "router-0", [pool], endpoints))


def test_adapters_of_the_spec_reach_the_routers_and_no_pod_is_replaced():
    bench = started(lora={})
    before = [kinds.uid_of(pod) for pod in bench.pods()]
    bench.edit(adapters=[LAW])
    bench.settle()
    assert routed(bench) == ["law"]
    bench.edit(adapters=[])
    bench.settle()
    assert routed(bench) == []
    assert [kinds.uid_of(pod) for pod in bench.pods()] == before


def test_an_llm_adapter_joins_the_list_and_leaves_it():
    bench = started(lora={}, adapters=[LAW])
    before = [kinds.uid_of(pod) for pod in bench.pods()]
    put_adapter(bench, "tax", pinned=True)
    bench.settle()
    assert routed(bench) == ["law", "tax"]
    bench.cluster.remove(kinds.LLM_ADAPTER, "default", "tax")
    bench.settle()
    assert routed(bench) == ["law"]
    assert [kinds.uid_of(pod) for pod in bench.pods()] == before


def test_the_status_lists_each_adapter_with_where_it_is():
    bench = started(adapters=[LAW], replicas=2)
    put_adapter(bench, "tax")
    put_adapter(bench, "med")
    why = "rank 128 is above --max-lora-rank 64"
    states = [AdapterState("law", "loaded"), AdapterState("tax", "failed", why),
              AdapterState("med", "unloaded")]  # fmt: skip
    bench.reconcile()
    report(bench, states, loaded={1: ["law"]})
    bench.settle()
    second = kinds.name_of(bench.pods()[1])
    law, tax, med = sorted(
        bench.deployment()["status"]["adapters"], key=lambda a: "ltm".index(a["name"][0])
    )
    assert law == {
        "name": "law",
        "uri": "hf://org/law",
        "phase": "Loaded",
        "loadedOn": 1,
        "pods": [second],
    }
    assert tax == {"name": "tax", "uri": "hf://org/tax", "resource": "tax", "phase": "Failed",
                   "loadedOn": 0, "message": why}  # fmt: skip
    assert (med["phase"], med["loadedOn"]) == ("Unloaded", 0)
    status = adapter_status(bench, "tax")
    assert conditions(status)["Accepted"][0] == "True"
    assert conditions(status)["Loaded"][:2] == ("False", "AdapterNotLoaded")
    assert why in conditions(status)["Loaded"][2]
    assert (status["phase"], status["loadedOn"]) == ("Failed", 0)

    report(bench, [AdapterState("tax", "loaded")], loaded={0: ["tax"], 1: ["tax"]})
    bench.settle()
    assert conditions(adapter_status(bench, "tax"))["Loaded"] == (
        "True", "AdapterLoaded", "It is loaded on 2 pods.",
    )  # fmt: skip


def test_who_takes_no_adapters_says_so_and_is_not_rolled():
    bench = started()
    before = [kinds.uid_of(pod) for pod in bench.pods()]
    put_adapter(bench, "tax")
    bench.settle()
    assert routed(bench) == []
    status, reason, message = conditions(adapter_status(bench, "tax"))["Accepted"]
    assert (status, reason) == ("False", "LoraDisabled")
    assert "spec.lora" in message
    assert [kinds.uid_of(pod) for pod in bench.pods()] == before


def test_an_adapter_of_nobody_says_so():
    bench = started(lora={})
    put_adapter(bench, "tax", deployment="missing")
    key = DeploymentKey("default", "missing")
    bench.deliver()
    asyncio.run(bench.reconciler.reconcile(key))
    status, reason, message = conditions(adapter_status(bench, "tax"))["Accepted"]
    assert (status, reason) == ("False", "DeploymentNotFound")
    assert "missing" in message


@pytest.mark.parametrize(
    ("name", "owner"), [("smollm2", "LLMDeployment smollm2"), ("law", "LLMDeployment smollm2")]
)
def test_a_name_of_the_deployment_is_taken(name: str, owner: str):
    bench = started(adapters=[LAW])
    put_adapter(bench, "other", name=name)
    bench.settle()
    status, reason, message = conditions(adapter_status(bench, "other"))["Accepted"]
    assert (status, reason) == ("False", "AdapterNameConflict")
    assert f"The name {name} already belongs to {owner}" in message
    assert routed(bench) == ["law"]


def test_of_two_llm_adapters_the_older_has_the_name():
    bench = started(lora={})
    put_adapter(bench, "z-first", name="tax", uri="hf://org/first")
    put_adapter(bench, "a-second", name="tax", uri="hf://org/second")
    outcome = bench.reconcile()
    bench.settle()
    assert outcome.again_after_s is not None  # the name may become free
    status, reason, message = conditions(adapter_status(bench, "a-second"))["Accepted"]
    assert (status, reason) == ("False", "AdapterNameConflict")
    assert "LLMAdapter z-first" in message
    (listed,) = bench.deployment()["status"]["adapters"]
    assert listed["resource"] == "z-first"
    bench.cluster.remove(kinds.LLM_ADAPTER, "default", "z-first")
    bench.settle()
    assert conditions(adapter_status(bench, "a-second"))["Accepted"][0] == "True"


def test_a_spec_that_names_anothers_model_is_refused():
    bench = started(lora={})
    other = bench.cluster.one(kinds.LLM_DEPLOYMENT, *KEY)
    body = {**other, "metadata": {"name": "younger", "namespace": "default"}, "status": {}}
    body["spec"] = {**other["spec"], "adapters": [{"name": "smollm2", "uri": "hf://org/x"}]}
    bench.clock.now += 5.0
    bench.cluster.put(body)
    bench.reconcile(DeploymentKey("default", "younger"))
    stored = bench.cluster.one(kinds.LLM_DEPLOYMENT, "default", "younger")
    status, reason, message = conditions(stored["status"])["Accepted"]
    assert (status, reason) == ("False", "ServedNameConflict")
    assert message.startswith("spec.adapters uses the name smollm2")


def test_many_adapters_are_not_written_with_every_change():
    bench = started(lora={})
    names = [f"a{number}" for number in range(FEW_ADAPTERS + 1)]
    for name in names:
        put_adapter(bench, name)
    bench.settle()
    report(bench, [AdapterState(name, "loaded") for name in names], loaded={0: names})
    bench.clock.now += RENEW_S
    bench.settle()
    version = bench.deployment()["metadata"]["resourceVersion"]
    report(bench, [AdapterState(name, "unloaded") for name in names], loaded={})
    bench.settle()
    assert bench.deployment()["metadata"]["resourceVersion"] == version
    bench.clock.now += RENEW_S
    report(bench, [AdapterState(name, "unloaded") for name in names], loaded={})
    bench.settle()
    assert bench.deployment()["metadata"]["resourceVersion"] != version
