"""Tells metrics what routing did: each placing, each end of an attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.metrics import RouterMetrics
    from octavo_router.routing.decision import Decision
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.outcome import Outcome
    from octavo_router.routing.request import RouteRequest


class MetricsObserver:
    """A dispatcher's observer. Hot path: both methods run for every attempt.

    What is counted by endpoint is counted here by the objects at hand, and handed on, label by
    label, when somebody wants to read it.
    """

    __slots__ = ("_ends", "_metrics", "_picks", "_placed_at")

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._placed_at: dict[str, float] = {}  # by pool: the latest
        self._picks: dict[tuple[Endpoint, str, str], int] = {}  # endpoint, pool, policy
        self._ends: dict[tuple[Endpoint, str, str], int] = {}  # endpoint, pool, result
        metrics.add_fold(self._fold)

    def placed(self, request: RouteRequest, decision: Decision) -> None:
        pool = request.pool
        self._placed_at[pool] = request.placed_at or self._metrics.now()
        picks, key = self._picks, (decision.endpoint, pool, decision.policy)
        picks[key] = picks.get(key, 0) + 1

    def finished(self, lease: Lease, outcome: Outcome) -> None:
        ends, key = self._ends, (lease.endpoint, lease.request.pool, outcome.result.label)
        ends[key] = ends.get(key, 0) + 1

    def _fold(self) -> None:
        metrics = self._metrics
        picks, self._picks = self._picks, {}
        for (endpoint, name, policy), count in picks.items():
            metrics.held_pool(name).running += count
            if endpoint.slot >= 0:  # what is late must not bring back what was forgotten
                metrics.held_endpoint(endpoint.id, pool=name).picks.add(policy, by=count)
        ends, self._ends = self._ends, {}
        for (endpoint, name, result), count in ends.items():
            pool = metrics.held_pool(name)
            pool.running -= count
            pool.attempts.add(result, by=count)
            if endpoint.slot >= 0:
                metrics.held_endpoint(endpoint.id, pool=name).outcomes.add(result, by=count)
        times, self._placed_at = self._placed_at, {}
        for name, at in times.items():
            metrics.held_pool(name).saw_request(at)
