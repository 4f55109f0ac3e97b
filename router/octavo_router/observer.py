"""Tells metrics what routing did: each placing, each end of an attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_router.metrics import RouterMetrics
    from octavo_router.routing.decision import Decision
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.outcome import Outcome
    from octavo_router.routing.request import RouteRequest


class MetricsObserver:
    """A dispatcher's observer. Hot path: both methods run for every attempt."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def placed(self, request: RouteRequest, decision: Decision) -> None:
        metrics, pool = self._metrics, request.pool
        metrics.endpoint(decision.endpoint.id, pool=pool).picks.add(decision.policy)
        counts = metrics.pool(pool)
        counts.running += 1
        counts.last_request_at = metrics.now()

    def finished(self, lease: Lease, outcome: Outcome) -> None:
        metrics, pool = self._metrics, lease.request.pool
        result = outcome.result.value
        endpoint = lease.endpoint
        counts = metrics.pool(pool)
        counts.running -= 1
        counts.attempts.add(result)
        if endpoint.slot >= 0:  # a late end must not bring back what was forgotten
            metrics.endpoint(endpoint.id, pool=pool).outcomes.add(result)
