"""Whether an endpoint is in the router's zone, and what it costs where it is not.

A request to another zone travels longer, and its bytes may be paid for. That is a price in seconds
as all others are: small, so that of two equal engines the near one is taken, and a queue or a
missing prefix weighs more. Where either zone is not known, nothing is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Change, Registry


class Locality:
    """Keeps `is_near` and `zone_s` of every endpoint."""

    def __init__(self, registry: Registry, zone: str, cost_s: float) -> None:
        self._registry = registry
        self._zone = zone  # "": not known
        self.cost_s = cost_s
        registry.subscribe(self._changed)
        self.configure(cost_s)

    def configure(self, cost_s: float) -> None:
        self.cost_s = cost_s
        for endpoint in self._registry.endpoints.values():
            self._note(endpoint)

    def _changed(self, change: Change) -> None:
        if change.kind in ("added", "updated"):
            self._note(change.endpoint)

    def _note(self, endpoint: Endpoint) -> None:
        zone = endpoint.spec.zone
        endpoint.is_near = zone == self._zone if zone and self._zone else None
        endpoint.zone_s = self.cost_s if endpoint.is_near is False else 0.0
