"""The operator that moves a study's engines between both sides: through the router's state page, as
in a cluster, and from there by its decision. What it decides reaches the router a second later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo.study.shapes import POOL
from octavo_engine.protocol.kubernetes import (
    COMPONENT_LABEL,
    ENGINE_COMPONENT,
    PROMPTS_SIDE,
    REVISION_LABEL,
    SIDE_LABEL,
)
from octavo_engine.protocol.sides import SideLimits
from octavo_engine.protocol.state import State
from octavo_operator.decide.flip import plan_flips
from octavo_operator.decide.observed import Observed
from octavo_operator.objects import kinds
from octavo_operator.routers.poller import RouterDemand
from octavo_operator.spec.prefill import FlipSpec
from octavo_router.admin.state import StateReporter
from octavo_router.flow.admin import AdminAccess
from octavo_router.flow.admission import AdmissionDemand as Waiting
from octavo_router.metrics import RouterMetrics

if TYPE_CHECKING:
    from octavo.study.study_router import StudyRouter
    from octavo.study.timeline import Timeline
    from octavo_engine.protocol.sides import SideTargets

ROUTER = "router-0"
TICK_S = WATCH_S = 1.0


class FlippingOperator:
    """For `Setup.mover`. Of one run: what it did is to be read from the attributes."""

    def __init__(self, targets: SideTargets, limits: SideLimits | None = None) -> None:
        self.reasons: list[str] = []
        self.num_moved = 0
        self._rules = FlipSpec(targets=targets, limits=limits or SideLimits())
        self._histories: Any = {}
        self._decoder = msgspec.json.Decoder(State)

    def __call__(self, router: StudyRouter, timeline: Timeline) -> None:
        self._router, self._timeline = router, timeline
        self._page = StateReporter(
            router.registry, lambda pool: Waiting(0, 0, 0), RouterMetrics(now=timeline.clock),
            replica=ROUTER, admin=AdminAccess(), prompt_tokens=router.dispatcher.prompt_tokens,
        )  # fmt: skip
        self._demand = RouterDemand(timeline.clock)
        self._demand.expect([ROUTER])
        self._pods = [
            {
                "metadata": {
                    "name": endpoint.id,
                    "uid": endpoint.id,
                    "labels": {
                        COMPONENT_LABEL: ENGINE_COMPONENT,
                        REVISION_LABEL: "one",
                        SIDE_LABEL: endpoint.role,
                    },
                },
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            }
            for endpoint in router.registry.pool(POOL)
        ]
        self._tick()

    def _tick(self) -> None:
        self._demand.learn(ROUTER, self._decoder.decode(msgspec.json.encode(self._page.state())))
        decision = plan_flips(
            self._rules, Observed(pods=tuple(self._pods)), self._demand.flip_signals(POOL), None,
            self._histories, now=self._timeline.now, now_text="",
        )  # fmt: skip
        self._histories = decision.histories
        self.reasons += decision.details
        for pod, labels in decision.moves:
            pod["metadata"]["labels"] |= labels
            self.num_moved += 1
        self._timeline.after(WATCH_S, self._publish)
        self._timeline.after(TICK_S, self._tick)

    def _publish(self) -> None:
        self._router.move(
            {
                kinds.uid_of(pod): "prefill"
                if kinds.labels_of(pod)[SIDE_LABEL] == PROMPTS_SIDE
                else "both"
                for pod in self._pods
            }
        )
