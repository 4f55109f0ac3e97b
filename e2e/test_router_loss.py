"""Routers leave in order and die at once; only what a dead one carried is lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from e2e.helm import NAMESPACE
from e2e.models import Model, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl


@pytest.fixture
def model(platform: Platform, space: Kubectl) -> Model:
    served = Model(space, simulated("routed", replicas=2))
    served.await_settled(2)
    return served


def test_a_router_that_leaves_finishes_what_it_carries(platform: Platform, model: Model) -> None:
    old = platform.pods("router")
    with Traffic(platform.base_url, model.name, clients=6, tokens=64, reconnects=True) as traffic:
        traffic.await_answers(6)
        platform.kubectl("delete", "pod", old[0], f"--namespace={NAMESPACE}", "--wait=true")
        model.until(lambda: len(platform.pods("router")) == 2, "second router", 60)
        traffic.await_answers(6)
    traffic.assert_unbroken()
    assert old[0] not in platform.pods("router")


def test_a_killed_router_takes_only_its_own_requests_along(
    platform: Platform, model: Model
) -> None:
    clients = 6
    with Traffic(
        platform.base_url, model.name, clients=clients, tokens=64, reconnects=True
    ) as traffic:
        traffic.await_answers(6)
        platform.kill(NAMESPACE, platform.pods("router")[0])
        killed_at = time.monotonic()
        traffic.await_answers(12)
        model.until(lambda: len(platform.pods("router")) == 2, "second router", 60)
        traffic.await_answers(6)
    outcomes = traffic.outcomes
    later = [outcome.fault for outcome in outcomes if outcome.began_at >= killed_at]
    assert len(later) >= 18
    assert not [fault for fault in later if fault], later
    lost = [outcome for outcome in outcomes if outcome.fault]
    assert len(lost) < clients, "the other router's requests were lost too"
    model.await_settled(2)
