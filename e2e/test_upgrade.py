"""The chart is upgraded, tests itself, and is removed and installed again, while models serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.helm import CRD, RELEASE, left_behind
from e2e.models import Model, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl


def test_other_values_reach_operator_and_routers_without_a_failed_request(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("upgraded", replicas=2))
    model.await_settled(2)
    engines = {pod["metadata"]["uid"] for pod in model.pods()}
    routers, operators = platform.pods("router"), platform.pods("operator")
    with Traffic(platform.base_url, model.name, reconnects=True) as traffic:
        traffic.await_answers(10)
        platform.helm.upgrade("router.logLevel=debug", "operator.logLevel=debug")
        traffic.await_answers(10)
        model.await_settled(2)
    traffic.assert_unbroken()
    model.until(lambda: len(platform.pods("router")) == 2, "two routers", 60)
    assert not set(platform.pods("router")) & set(routers)
    assert not set(platform.pods("operator")) & set(operators)
    assert {pod["metadata"]["uid"] for pod in model.pods()} == engines, "engines stayed"


def test_the_chart_s_own_test_passes(platform: Platform) -> None:
    assert "Phase:          Succeeded" in platform.helm("test", RELEASE)


def test_what_serves_outlives_the_release_and_is_found_by_the_next(
    platform: Platform, space: Kubectl
) -> None:
    model = Model(space, simulated("survivor"))
    model.await_settled()
    engines = {pod["metadata"]["uid"] for pod in model.pods()}
    platform.helm("uninstall", RELEASE, "--wait")
    # The Lease is its Deployment's, and collected a moment after it.
    model.until(lambda: not left_behind(platform.kubectl), "namespace without ours", 60)
    assert platform.kubectl("get", "crd", CRD, "--output=name").strip().endswith(CRD)
    assert {pod["metadata"]["uid"] for pod in model.pods()} == engines
    platform.helm.upgrade()
    model.await_settled()
    with Traffic(platform.base_url, model.name) as traffic:
        traffic.await_answers(10)
    traffic.assert_unbroken(at_least=10)
    assert {pod["metadata"]["uid"] for pod in model.pods()} == engines
