"""A new revision that performs worse is rolled back, and its numbers are in the status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.models import Model, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

CANARY = {
    "strategy": "Canary",
    "canary": {"steps": [{"weight": 50, "pause": "10s"}], "analysis": {"minRequests": 10}},
}
SLOW = {"sim-step-base-ms": "200"}


def test_a_slow_revision_is_rolled_back_without_a_failed_request(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("careful", replicas=2, rollout=CANARY))
    model.await_settled(2)
    (old,) = model.revisions()
    with Traffic(platform.base_url, model.name, clients=6, tokens=8) as traffic:
        traffic.await_answers(10)
        model.patch(engine={"args": SLOW})

        def is_rejected() -> bool:
            return any(
                model.condition(kind)["reason"] == "CanaryRejected"
                for kind in ("Degraded", "Progressing", "Ready")
            )

        model.until(is_rejected, "judgement", 120)
        model.until(lambda: model.revisions() == {old}, "way back", 60)
        traffic.await_answers(10)
    traffic.assert_unbroken()
    messages = " ".join(model.condition(kind)["message"] for kind in ("Degraded", "Progressing"))
    assert any(figure.isdigit() for figure in messages), messages
    model.until(lambda: len(model.pods()) == 2, "two pods", 60)
