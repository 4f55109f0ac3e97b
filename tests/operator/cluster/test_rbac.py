"""The table of rights and the calls in the code say the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_operator.cluster import rbac
from octavo_operator.objects import kinds
from octavo_operator.watch.world import LISTED, WATCHED
from tests.fakes.operator import OperatorBench

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fakes.cluster import Call

Right = tuple[kinds.Kind, str, str]  # with the subresource and the verb

VERBS = {
    "get": {"get"}, "find": {"list"}, "apply": {"patch", "create"}, "create": {"create"},
    "patch": {"patch"}, "delete": {"delete"}, "replace": {"update"},
}  # fmt: skip

SUBRESOURCES = {
    "apply_status": ("status", "patch"), "condition": ("status", "patch"), "log": ("log", "get"),
}  # fmt: skip


def granted(kind: kinds.Kind, subresource: str = "") -> set[str]:
    rules = [r for r in rbac.SERVED if r.kind == kind and r.subresource == subresource]
    return {verb for rule in rules for verb in rule.verbs}


def test_every_call_of_a_whole_life_is_granted():
    bench = OperatorBench()
    bench.create(replicas=3)
    bench.settle()
    bench.edit(engine={"maxNumSeqs": 7})
    bench.settle()
    bench.edit(replicas=1)
    bench.settle()
    assert {call.verb for call in bench.cluster.calls} >= {"get", "find", "apply", "delete"}
    for call in bench.cluster.calls:
        if call.verb == "apply_status":
            assert "patch" in granted(call.kind, "status"), call
        elif call.verb == "condition":
            assert "patch" in granted(kinds.POD, "status"), call
        else:
            assert VERBS[call.verb] <= granted(call.kind), call


def used(calls: Iterable[Call]) -> set[Right]:
    """What is watched and listed, and what these calls need. Owned kinds are all treated alike,
    but claims, of which none is ever deleted."""
    found = {(kind, "", verb) for kind in WATCHED for verb in ("list", "watch")}
    found |= {(kind, "", "list") for kind in LISTED}
    for call in calls:
        if call.verb in SUBRESOURCES:
            subresource, verb = SUBRESOURCES[call.verb]
            found.add((call.kind, subresource, verb))
            continue
        alike = kinds.OWNED if call.kind in kinds.OWNED and call.verb != "find" else (call.kind,)
        for kind in alike:
            if (kind, call.verb) != (kinds.VOLUME_CLAIM, "delete"):
                found |= {(kind, "", verb) for verb in VERBS[call.verb]}
    return found


def test_nothing_is_granted_that_no_call_uses():
    bench = OperatorBench()
    bench.create(replicas=2, model={"uri": "hf://org/name"})
    bench.cluster.put(
        {
            "apiVersion": kinds.LLM_ADAPTER.api_version, "kind": kinds.LLM_ADAPTER.name,
            "metadata": {"name": "law", "namespace": "default"},
            "spec": {"deployment": "smollm2", "uri": "hf://org/law"},
        }
    )  # fmt: skip
    bench.reconcile()
    bench.workloads.sync()
    fetching, silent = bench.pods()
    state = {"name": "fetch", "state": {"running": {}}}
    bench.workloads.set_status(fetching, {"initContainerStatuses": [state]})
    scheduled = {"type": "PodScheduled", "status": "True"}
    bench.workloads.set_status(silent, {"conditions": [scheduled]})
    bench.reconcile()
    bench.settle()
    bench.edit(engine={"maxNumSeqs": 7})
    bench.settle()
    bench.edit(replicas=1)
    bench.settle()
    rights = {(r.kind, r.subresource, verb) for r in rbac.SERVED for verb in r.verbs}
    assert rights - used(bench.cluster.calls) == {
        # For owner references that block deletion: the API server checks it, no call names it.
        (kinds.LLM_DEPLOYMENT, "finalizers", "update"),
    }


def test_everything_that_is_watched_may_be_watched():
    for kind in WATCHED:
        assert {"list", "watch"} <= granted(kind), kind


def test_nothing_dangerous_is_granted():
    every = [*rbac.SERVED, *rbac.leading("l"), *rbac.ROUTERS]
    plurals = {rule.kind.plural for rule in every}
    assert not plurals & {"secrets", "nodes", "roles", "rolebindings", "namespaces"}
    assert not any("*" in verb for rule in every for verb in rule.verbs)
    assert "delete" not in granted(kinds.VOLUME_CLAIM)
    assert {rule.subresource for rule in every} <= {"", "status", "finalizers", "log"}


def test_rules_are_rendered_once_per_group_and_verbs():
    rendered = rbac.role("octavo-operator", rbac.SERVED)
    assert rendered["kind"] == "ClusterRole"
    resources = ["llmdeployments/status", "llmadapters/status"]
    rule = {"apiGroups": ["octavo.dev"], "resources": resources, "verbs": ["patch"]}
    assert rule in rendered["rules"]
    own = rbac.role("lease", rbac.leading("octavo-operator"), namespace="ops", labels={"a": "b"})
    assert own["metadata"] == {"name": "lease", "namespace": "ops", "labels": {"a": "b"}}
    assert own["rules"][1]["resourceNames"] == ["octavo-operator"]
