"""Engines that load and unload adapters when the test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_router.adapters.fleet import AdapterFleet
    from octavo_router.endpoints.endpoint import Endpoint


class HeldCalls:
    """An `AdapterCalls` that keeps what engines get. Set `fleet` before the first call."""

    fleet: AdapterFleet

    def __init__(self) -> None:
        self.loads: list[tuple[Endpoint, str, str]] = []
        self.unloads: list[tuple[Endpoint, str, Callable[[], None]]] = []

    def load(self, endpoint: Endpoint, name: str, uri: str, *, in_place: bool) -> None:
        self.loads.append((endpoint, name, uri))

    def unload(self, endpoint: Endpoint, name: str, then: Callable[[], None]) -> None:
        self.unloads.append((endpoint, name, then))

    def finish(self, reason: str = "") -> None:
        """All that is requested, and what follows from it. `reason`: loads fail for it."""
        while self.loads or self.unloads:
            loads, self.loads = self.loads, []
            unloads, self.unloads = self.unloads, []
            for endpoint, name, then in unloads:
                self.fleet.unloaded(endpoint, name)
                then()
            for endpoint, name, _ in loads:
                if reason:
                    self.fleet.failed(endpoint, name, reason)
                else:
                    self.fleet.loaded(endpoint, name)
