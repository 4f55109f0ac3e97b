"""How many more requests a pool would take: the number that decides who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_router.config.settings import FlowConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry


class PoolCapacity:
    """An endpoint is full when it says so, or at `in_flight_factor` times its seats.

    Somewhat more than its seats, so that it always has the next request at hand; not much more, so
    that who goes next is decided here, by priority and fairness, and not by its own queue.
    """

    __slots__ = ("_registry", "config")

    def __init__(self, registry: Registry, config: FlowConfig) -> None:
        self.config = config  # may be replaced at any time
        self._registry = registry

    def has_room(self, pool: str, revision: str = "") -> bool:
        # Hot path, so that most endpoints are settled without `_free`.
        config = self.config
        for endpoint in self._registry.candidates(pool, revision).endpoints:
            load = endpoint.load
            if load.is_saturated:
                continue
            seats = endpoint.max_num_seqs
            limit = int(seats * config.in_flight_factor) if seats else config.max_in_flight
            busy = load.running + load.waiting
            is_slow = endpoint.share < 1.0  # it has just returned
            if not is_slow and endpoint.in_flight < limit and busy < limit:
                return True
            if self._free(endpoint) > 0:
                return True
        return False

    def room(self, pool: str, revision: str = "") -> int:
        return sum(
            max(0, self._free(endpoint))
            for endpoint in self._registry.candidates(pool, revision).endpoints
            if not endpoint.load.is_saturated
        )

    def is_empty(self, pool: str, revision: str = "") -> bool:
        return not self._registry.candidates(pool, revision).endpoints

    def _free(self, endpoint: Endpoint) -> int:
        config = self.config
        seats = endpoint.max_num_seqs
        limit = int(seats * config.in_flight_factor) if seats else config.max_in_flight
        if endpoint.share < 1.0:
            limit = int(limit * endpoint.share)
        load = endpoint.load
        busy = load.running + load.waiting
        return max(limit, 1) - (busy if busy > endpoint.in_flight else endpoint.in_flight)
