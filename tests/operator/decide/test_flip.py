"""Pods that change sides, from what routers report. The decision itself is in protocol.sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    PREFILL_COMPONENT,
    REVISION_LABEL,
    SIDE_LABEL,
)
from octavo_engine.protocol.sides import HOLD_S, SideLimits, SideTargets
from octavo_operator.decide.flip import (
    EngineFigures,
    FlipDecision,
    FlipSignals,
    LastFlip,
    count_sides,
    is_labelled,
    plan_flips,
)
from octavo_operator.decide.observed import Observed
from octavo_operator.objects import kinds
from octavo_operator.spec.prefill import FlipSpec

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Object

RULES = FlipSpec(targets=SideTargets(0.5, 0.01), limits=SideLimits())


def pod(name: str, *, side: str = "decode", revision: str = "one", ready: bool = True) -> Object:
    component = PREFILL_COMPONENT if name.startswith("p") else ENGINE_COMPONENT
    labels = {COMPONENT_LABEL: component, REVISION_LABEL: revision}
    if side:
        labels[SIDE_LABEL] = side
    return {
        "metadata": {"name": name, "uid": name, "labels": labels},
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def pods(revision: str = "one", **each: Any) -> list[Object]:
    """One of the prefill pods and three of those that answer, all of which answer now."""
    return [
        pod(f"{name}-{revision}", revision=revision, **each) for name in ("p0", "e1", "e2", "e3")
    ]


def signals(second: int, *found: Object) -> FlipSignals:
    """Prompts on each engine that make its answers late."""
    figures = EngineFigures(15, 0, 6000 * second, 4e-5, 0.011)
    return FlipSignals({kinds.uid_of(one): figures for one in found}, 1200.0)


def watched(*found: Object, seconds: int = 12, rules: FlipSpec | None = RULES) -> FlipDecision:
    """The first decision that moves a pod, or the last one."""
    decision = FlipDecision()
    for second in range(seconds):
        decision = plan_flips(
            rules, Observed(pods=found), signals(second, *found), None, decision.histories,
            now=float(second), now_text=f"second {second}",
        )  # fmt: skip
        if decision.moves:
            break
    return decision


def moved(decision: FlipDecision) -> dict[str, str]:
    return {kinds.name_of(one): labels[SIDE_LABEL] for one, labels in decision.moves}


def test_pods_go_where_they_are_needed_once_that_was_measured():
    decision = watched(*pods())
    assert set(moved(decision).values()) == {"prefill"} and len(decision.moves) == 2
    assert decision.last is not None
    assert decision.last.changed_at == f"second {HOLD_S:.0f}"
    assert decision.last.reason.startswith("2 instead of 0 of 4 engines compute prompts")
    (detail,) = decision.details
    assert detail.startswith("Flipped e1-one, e2-one to compute prompts: 2 instead of 0")


def test_the_next_change_waits_and_the_last_one_is_kept():
    first = watched(*pods())
    after = plan_flips(
        RULES, Observed(pods=tuple(pods())), signals(12, *pods()), first.last, first.histories,
        now=HOLD_S + 1, now_text="later",
    )  # fmt: skip
    assert not after.moves
    assert after.last == first.last


def test_what_this_reconcile_decided_stays():
    last = LastFlip("because", "then")
    limits = FlipSpec(targets=RULES.targets, limits=SideLimits(1, 1))
    found = tuple(pods())
    for is_decided in (True, False):
        decision = plan_flips(
            limits, Observed(pods=found), signals(0, *found), last, {}, now=0.0, now_text="now",
            is_decided=is_decided,
        )  # fmt: skip
        assert bool(decision.moves) is not is_decided
    assert decision.last == LastFlip("0 of 4 engines compute prompts; the fewest are 1", "now")


def test_revisions_are_decided_apart():
    decision = watched(*pods("one"), *pods("two"))
    assert sorted(name.partition("-")[2] for name in moved(decision)) == [
        "one",
        "one",
        "two",
        "two",
    ]


def test_nothing_moves_without_the_field_or_the_label_or_a_report():
    assert watched(*pods(), rules=None) == FlipDecision()
    assert not watched(*pods(side="")).moves
    assert not watched(*pods(ready=False)).moves
    found = tuple(pods())
    silent = plan_flips(
        FlipSpec(targets=RULES.targets, limits=SideLimits(3, 1)), Observed(pods=found),
        FlipSignals(), None, {}, now=0.0, now_text="",
    )  # fmt: skip
    assert not silent.moves


def test_pods_are_counted_where_they_are_now():
    found = [pod("e0"), pod("e1", side="prefill"), pod("p0", side=""), pod("e2", ready=False)]
    assert count_sides(Observed(pods=tuple(found))) == (1, 2)
    assert not is_labelled(Observed(pods=tuple(found)))
    assert is_labelled(Observed(pods=tuple(found[:2]))) and is_labelled(Observed())
