"""Everything is replaced in turn under load: engines, routers, the operator, a node's pods.

One round as a rule, which is a minute or two; for ten minutes:

    make e2e E2E=e2e/test_rolling.py E2E_ARGS="-s --rolling-minutes 10"
"""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING

import pytest

from e2e.cluster.layout import NODE_NAME
from e2e.helm import NAMESPACE, RELEASE
from e2e.models import PACE, Model, simulated
from e2e.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.conftest import Platform
    from e2e.kubectl import Kubectl

REPLICAS = 2
OURS = "app.kubernetes.io/part-of=octavo"
# There is no other node: what is evicted comes back to the one that is drained.
TAINT = "node.kubernetes.io/unschedulable"
TOLERATION = {"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}
TOLERANT = tuple(
    f"{part}.tolerations[0].{key}={value}"
    for part in ("router", "operator")
    for key, value in TOLERATION.items()
)
STEP_S = 120.0  # for any of them, on a machine that does much else


@pytest.fixture
def rolling(platform: Platform, space: Kubectl) -> Iterator[Model]:
    """A model on a platform whose pods tolerate a node that is drained."""
    platform.helm.upgrade(*TOLERANT)
    template = {"spec": {"tolerations": [TOLERATION]}}
    model = Model(space, simulated("rolls", replicas=REPLICAS, podTemplate=template))
    try:
        model.await_settled(REPLICAS)
        yield model
    finally:
        platform.kubectl("uncordon", NODE_NAME)
        platform.helm.upgrade()


@pytest.mark.timeout(3600)  # with --rolling-minutes
def test_everything_is_replaced_in_turn_without_a_failed_request(
    platform: Platform, rolling: Model, request: pytest.FixtureRequest
) -> None:
    minutes: float = request.config.getoption("--rolling-minutes")
    ends_at = time.monotonic() + 60.0 * minutes
    rounds = Rounds(platform, rolling)
    with Traffic(platform.base_url, rolling.name, reconnects=True) as traffic:
        traffic.await_answers(10)
        for number in count(1):
            for name, step in rounds.steps:
                began_at = time.monotonic()
                step(number)
                traffic.await_answers(10)
                faults = [outcome.fault for outcome in traffic.outcomes if outcome.fault]
                print(
                    f"{number}: {name} after {time.monotonic() - began_at:.0f} s,"
                    f" {len(traffic.outcomes)} requests, {len(faults)} failed",
                    flush=True,
                )  # fmt: skip
                assert not faults, faults[:5]
            if time.monotonic() >= ends_at:
                break
    traffic.assert_unbroken(at_least=50)


class Rounds:
    """Each step replaces pods, and returns when all of the new ones serve."""

    def __init__(self, platform: Platform, model: Model) -> None:
        self._platform = platform
        self._model = model
        self.steps = (
            ("engines", self.roll_engines),
            ("routers", self.roll_routers),
            ("operator", self.roll_operator),
            ("drained node", self.drain_node),
        )

    def roll_engines(self, number: int) -> None:
        before = self._pods()
        self._model.patch(engine={"args": {**PACE, "max-queue": 512 + number}})
        self._settle()
        assert not self._pods()["engine"] & before["engine"]

    def roll_routers(self, _number: int) -> None:
        self._restart("router")

    def roll_operator(self, _number: int) -> None:
        self._restart("operator")

    def drain_node(self, _number: int) -> None:
        before = self._pods()
        kubectl = self._platform.kubectl
        words = (f"--pod-selector={OURS}", "--delete-emptydir-data", f"--timeout={STEP_S:.0f}s")
        try:
            kubectl("drain", NODE_NAME, *words)
        finally:
            kubectl("uncordon", NODE_NAME)
        self._settle()
        for component, pods in self._pods().items():
            assert not pods & before[component], f"{component}: pods that were to be evicted"

    def _restart(self, component: str) -> None:
        before = self._pods()[component]
        words = (f"deployment/{RELEASE}-{component}", f"--namespace={NAMESPACE}")
        self._platform.kubectl("rollout", "restart", *words)
        self._platform.kubectl("rollout", "status", *words, f"--timeout={STEP_S:.0f}s")
        self._settle()
        assert not self._pods()[component] & before

    def _settle(self) -> None:
        def is_settled() -> bool:
            return len(self._platform.pods("router")) == 2 and bool(self._platform.pods("operator"))

        self._model.until(is_settled, "two routers and an operator", STEP_S)
        self._model.await_settled(REPLICAS, STEP_S)

    def _pods(self) -> dict[str, set[str]]:
        return {
            "engine": {pod["metadata"]["name"] for pod in self._model.pods()},
            "router": set(self._platform.pods("router")),
            "operator": set(self._platform.pods("operator")),
        }
