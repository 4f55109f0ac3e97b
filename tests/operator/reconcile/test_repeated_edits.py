"""Edit after edit, good and bad, with and without an operator: the last word counts, and while it
is being followed nobody loses a replica that serves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo_operator.objects import kinds
from tests.fakes.operator import OperatorBench, running_operator

REPLICAS = 3


def edited(number: int) -> dict[str, Any]:
    return {"engine": {"maxNumSeqs": number}}


def children(bench: OperatorBench) -> dict[tuple[str, str], Any]:
    """All that the operator made, without what only tells when it was written."""
    written = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields")
    found = {}
    for kind in kinds.OWNED:
        for body in bench.cluster.all(kind):
            metadata = {k: v for k, v in body["metadata"].items() if k not in written}
            metadata.pop("ownerReferences", None)
            kept = {k: v for k, v in body.items() if k not in ("metadata", "status")}
            found[kind.name, kinds.name_of(body)] = {**kept, "metadata": metadata}
    return found


@pytest.mark.parametrize("seed", range(5))
def test_three_edits_in_a_row_and_a_revert_with_an_operator_that_is_killed_at_every_step(seed):
    rng = random.Random(seed)
    bench = running_operator(replicas=REPLICAS)
    wanted = children(bench)
    edits: list[dict[str, Any]] = [*map(edited, (5, 6, 7)), {"engine": {"maxNumSeqs": None}}]
    for step in range(120):
        if edits and rng.random() < 0.3:
            bench.edit(**edits.pop(0))
        # Whatever it had in mind is gone; what it wrote is there.
        bench = OperatorBench(bench.cluster, clock=bench.clock)
        outcome = bench.reconcile()
        assert bench.num_ready() >= REPLICAS, step
        bench.workloads.sync()
        if rng.random() < 0.5:
            bench.workloads.make_all_ready()
        assert bench.num_ready() >= REPLICAS, step
        bench.clock.advance(1.0)
        if not edits and not outcome.is_failed and step > 80:
            break
    bench.settle()
    assert children(bench) == wanted
    assert bench.conditions()["Ready"][:2] == ("True", "Serving")


def test_an_operator_that_was_away_for_twenty_edits_follows_the_last_one_only():
    """Pods died meanwhile as well."""
    bench = running_operator(replicas=REPLICAS)
    for number in range(1, 20):
        bench.edit(**edited(number))
    bench.cluster.remove(kinds.POD, "default", kinds.name_of(bench.pods()[0]))
    bench.edit(replicas=2, **edited(77))
    again = OperatorBench(bench.cluster, clock=bench.clock)
    again.settle()
    reference = running_operator(replicas=2, **edited(77))
    assert set(again.engines()) == set(reference.engines())
    assert again.engines() == reference.engines()
    assert [kind for kind, _ in children(again)] == [kind for kind, _ in children(reference)]


BAD: dict[str, dict[str, Any]] = {
    "image": {"engine": {"image": "registry.example/no/such:1"}},
    "GPU": {"resources": {"limits": {"nvidia.com/gpu": 64}}},
    "digest": {"model": {"uri": "hf://org/model", "digest": "sha256:" + "0" * 64}},
    "memory": {"resources": {"limits": {"memory": "16Mi"}}},
    "executor": {"engine": {"executor": "ray"}},
}
GOOD: dict[str, dict[str, Any]] = {
    "image": {"engine": {"image": None}},
    "GPU": {"resources": {"limits": {"nvidia.com/gpu": None}}},
    "digest": {"model": {"uri": "demo://smollm2", "digest": None}},
    "memory": {"resources": {"limits": {"memory": None}}},
    "executor": {"engine": {"executor": None}},
}


@pytest.mark.parametrize("name", BAD)
def test_good_after_bad_is_as_if_nothing_had_been(name):
    bench = running_operator(replicas=REPLICAS)
    before = children(bench)
    bench.edit(**BAD[name])
    for _ in range(10):  # its pods never come up
        bench.reconcile()
        bench.workloads.sync()
        bench.clock.advance(5.0)
        assert bench.num_ready() == REPLICAS
    bench.edit(**GOOD[name])
    bench.settle()
    assert children(bench) == before
    assert bench.conditions()["Degraded"][0] == "False"
    assert bench.conditions()["Ready"][:2] == ("True", "Serving")
