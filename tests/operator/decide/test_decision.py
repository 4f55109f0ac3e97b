"""The whole decision is a function of its inputs: it reads no clock and keeps nothing."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from octavo_operator.decide.accepted_spec import accept
from octavo_operator.decide.adapters import AdapterClaim
from octavo_operator.decide.autoscale import LoadSignals
from octavo_operator.decide.canary import CanaryState, CanaryTotals, Sample
from octavo_operator.decide.decision import (
    DecisionInputs,
    DecisionMemory,
    ReconcileDecision,
    decide,
)
from octavo_operator.decide.flip import FlipSignals
from octavo_operator.decide.observed import DeploymentKey, Observed
from octavo_operator.decide.rollout_slots import RolloutSlot
from octavo_operator.errors import SpecInvalid
from octavo_operator.objects import kinds
from tests.fakes.deployments import with_images
from tests.fakes.operator import KEY, OperatorBench, make_deployment, running_operator

SETTINGS = with_images(None)
OTHER = DeploymentKey("team-b", "earlier")
BY_LOAD = {"minReplicas": 1, "maxReplicas": 8, "targets": {"inFlight": 4}}


def inputs(observed: Observed | None = None, **spec: Any) -> DecisionInputs:
    body = make_deployment(**spec)
    body["metadata"] |= {"uid": "owner", "generation": 1}
    return DecisionInputs(
        accepted=accept(body, {}, SETTINGS),
        settings=SETTINGS,
        owner_uid="owner",
        status={},
        rollout=CanaryState(),
        scaling=None,
        prefill_scaling=None,
        last_flip=None,
        observed=observed or Observed(),
        adapters=(),
        slot=RolloutSlot(is_held=False, is_free=True, most=10),
        in_flight={},
        signals=LoadSignals(),
        prefill_signals=LoadSignals(),
        flip_signals=FlipSignals(),
        canary_totals=CanaryTotals(),
        adapter_totals={},
        loaded_adapters=(),
        memory=DecisionMemory(),
        settled={},
        has_scaled=False,
        now=100.0,
        epoch_now=1_000.0,
        now_text="2026-01-01T00:00:00Z",
    )


def of_bench(bench: OperatorBench, **spec: Any) -> DecisionInputs:
    """What runs on the bench, with another spec: a rollout that may begin."""
    given = inputs(bench.world.observe(KEY), **spec)
    return replace(given, owner_uid=kinds.uid_of(bench.deployment()))


def text(decision: ReconcileDecision) -> str:
    return ", ".join(decision.snapshot.plan.hold)


def test_the_same_inputs_give_the_same_decision_and_stay_as_they_are():
    given = inputs(replicas=2)
    before = deepcopy(given)
    first, second = decide(given), decide(given)
    assert (first.snapshot.plan, first.memory) == (second.snapshot.plan, second.memory)
    assert given == before
    applied = [kinds.kind_of(body) for body in first.snapshot.plan.apply]
    assert applied[-1] == kinds.DEPLOYMENT


def test_what_the_next_decision_needs_is_in_the_memory():
    """A window begins with the first decision, and has passed by the second."""
    calm = LoadSignals(serving=2, in_flight=1, is_known=True, is_complete=True)
    given = replace(inputs(replicas=2, autoscaling=BY_LOAD), signals=calm)
    first = decide(given)
    assert first.snapshot.target.replicas == 2
    later = replace(given, scaling=first.snapshot.scaling, now=100.0 + 600.0)
    assert decide(later).snapshot.target.replicas == 2  # without memory a new window begins
    assert decide(replace(later, memory=first.memory)).snapshot.target.replicas == 1


def test_a_reconcile_scales_once():
    calm = LoadSignals(serving=2, in_flight=1, is_known=True, is_complete=True)
    given = replace(inputs(replicas=2, autoscaling=BY_LOAD), signals=calm)
    first = decide(given)
    again = replace(
        given, scaling=first.snapshot.scaling, memory=first.memory, now=700.0, has_scaled=True
    )
    decision = decide(again)
    assert decision.snapshot.target.replicas == 2
    assert decision.memory.scale == first.memory.scale


def test_a_reconcile_scales_each_side_once_and_remembers_it():
    calm = LoadSignals(serving=2, queued_tokens=0, is_known=True, is_complete=True)
    prefill = {"secretRef": {"name": "kv"}, "replicas": 3, "autoscaling": {"maxReplicas": 4}}
    given = replace(inputs(replicas=2, prefill=prefill), prefill_signals=calm)
    first = decide(given)
    assert (first.snapshot.target.replicas, first.snapshot.wanted_prefill) == (2, 3)
    stored = replace(
        given, prefill_scaling=first.snapshot.prefill_scaling, memory=first.memory, now=700.0
    )
    assert decide(stored).snapshot.wanted_prefill == 2
    again = decide(replace(stored, has_scaled=True))
    assert again.snapshot.wanted_prefill == 3
    assert again.memory.prefill_scale == first.memory.prefill_scale


class TestSlots:
    def test_a_rollout_without_a_free_slot_waits_and_says_so(self):
        given = of_bench(running_operator(), engine={"maxModelLen": 512})
        free = decide(given)
        assert free.holds_slot
        assert not free.snapshot.is_queued
        full = replace(given, slot=RolloutSlot(is_held=False, is_free=False, most=3))
        waiting = decide(full)
        assert waiting.snapshot.is_queued
        assert not waiting.holds_slot
        assert "at most 3 at a time" in text(waiting)
        assert waiting.snapshot.target.revision in given.observed.engines

    @pytest.mark.parametrize("slot", [None, RolloutSlot(False, is_free=False, most=1)])
    def test_what_runs_already_needs_none(self, slot: RolloutSlot | None):
        decision = decide(replace(of_bench(running_operator()), slot=slot))
        assert not decision.holds_slot
        assert not decision.snapshot.is_queued

    def test_a_rejected_revision_neither_takes_nor_loses_one(self):
        given = of_bench(running_operator(), engine={"maxModelLen": 512})
        wanted = decide(given).snapshot.revision
        slot = RolloutSlot(is_held=True, is_free=False, most=1)
        decision = decide(replace(given, rollout=CanaryState(rejected=wanted), slot=slot))
        assert decision.holds_slot
        assert not decision.snapshot.is_queued


def test_a_canary_is_judged_by_what_came_after_its_step_began():
    rollout = {"strategy": "Canary", "canary": {"steps": [{"weight": 50}]}}
    given = of_bench(running_operator(), engine={"maxModelLen": 512}, rollout=rollout)
    (stable,) = given.observed.engines
    state = CanaryState(stable=stable, revision=decide(given).snapshot.revision)
    earlier = CanaryTotals(Sample(requests=500), Sample(requests=500, errors=500), is_reported=True)
    first = decide(replace(given, rollout=state, canary_totals=earlier))
    assert not first.snapshot.capacity.state.rejected
    bad = Sample(requests=1_000, errors=1_000)
    later = CanaryTotals(Sample(requests=1_000), bad, is_reported=True)
    trial = replace(given, rollout=state, canary_totals=later, memory=first.memory)
    assert decide(trial).snapshot.capacity.state.rejected == state.revision
    silent = replace(trial, canary_totals=replace(later, is_reported=False))
    assert not decide(silent).snapshot.capacity.state.rejected


def test_an_adapter_whose_name_belongs_to_another_is_refused():
    body = {
        "apiVersion": "octavo.dev/v1alpha1", "kind": "LLMAdapter",
        "metadata": {"name": "sql", "namespace": "default"},
        "spec": {"deployment": KEY.name, "uri": "file:///sql"},
    }  # fmt: skip
    given = inputs(lora={})
    own, taken = (AdapterClaim(body, owner) for owner in ("", "LLMAdapter sql in namespace a"))
    (one,) = decide(replace(given, adapters=[own])).snapshot.adapters.taken
    assert one.adapter.name == "sql"
    (refused,) = decide(replace(given, adapters=[taken])).snapshot.adapters.refused
    assert refused.message == "The name sql already belongs to LLMAdapter sql in namespace a"


def test_a_name_that_belongs_to_another_is_refused_before_anything_is_decided():
    body = make_deployment()
    with pytest.raises(SpecInvalid, match="belongs to LLMDeployment earlier in namespace team-b"):
        accept(body, {KEY.name: OTHER}, SETTINGS)
    assert accept(body, {"unused": OTHER}, SETTINGS).refusal is None
