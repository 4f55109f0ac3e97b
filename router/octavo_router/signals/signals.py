"""Listens to every endpoint that the registry knows, from its coming to its going."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from octavo_router.residency.tier_slots import SharedSlots
from octavo_router.signals.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from octavo_router.endpoints.endpoint import Endpoint, State
    from octavo_router.endpoints.registry import Change, Registry
    from octavo_router.http.deadlines import DeadlineTick
    from octavo_router.metrics import RouterMetrics
    from octavo_router.signals.interfaces import ResidencySink
    from octavo_router.signals.settings import SignalSettings

logger = logging.getLogger(__name__)

STUMBLE_PAUSE_S = 1.0


class Signals:
    """Owns one task for each endpoint. Use as `async with Signals(...)`."""

    def __init__(
        self,
        registry: Registry,
        index: ResidencySink,
        metrics: RouterMetrics,
        settings: SignalSettings,
        *,
        deadlines: DeadlineTick,
        now: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._registry = registry
        self._index, self._shared = index, SharedSlots(index)
        self._metrics = metrics
        self._settings = settings
        self._deadlines = deadlines
        self._now = now
        self._rng = rng or random.Random()
        self._subscriptions: dict[Endpoint, Subscription] = {}
        self._states: dict[Endpoint, State] = {}
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}
        self._unsubscribe: Callable[[], None] | None = None

    async def __aenter__(self) -> Self:
        self._unsubscribe = self._registry.subscribe(self._registry_changed)
        for endpoint in list(self._registry.endpoints.values()):
            self._start(endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._unsubscribe is not None
        self._unsubscribe()
        tasks = list(self._tasks.values())
        for endpoint in list(self._subscriptions):
            self._stop(endpoint)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def first_round(self, timeout_s: float) -> bool:
        """Waits until every endpoint known now was tried once; False when that took too long."""
        tried = [subscription.has_tried.wait() for subscription in self._subscriptions.values()]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*tried)
        except TimeoutError:
            return False
        return True

    def _registry_changed(self, change: Change) -> None:
        endpoint = change.endpoint
        match change.kind:
            case "added":
                self._start(endpoint)
            case "removed":
                self._stop(endpoint)
                self._states.pop(endpoint, None)
                self._metrics.forget_endpoint(endpoint.id)
            case "updated":
                if endpoint in self._subscriptions:
                    self._subscriptions[endpoint].discovery_changed()
            case "state":
                self._state_changed(endpoint)

    def _state_changed(self, endpoint: Endpoint) -> None:
        counts = self._metrics.pool(endpoint.pool)
        if endpoint.state == self._states.get(endpoint):
            return  # its names changed
        self._states[endpoint] = endpoint.state
        counts.state_changes.add(endpoint.state)
        if endpoint.state == "ejected":
            counts.ejections += 1
            address = endpoint.spec.address.authority
            extra = {"endpoint": address, "pool": endpoint.pool, "reason": endpoint.reason}
            logger.warning("Set an engine aside", extra=extra)

    def _start(self, endpoint: Endpoint) -> None:
        subscription = Subscription(
            endpoint,
            index=self._index,
            states=self._registry,
            counts=self._metrics.signals,
            settings=self._settings,
            now=self._now,
            rng=self._rng,
            deadlines=self._deadlines,
            shared=self._shared,
        )
        self._subscriptions[endpoint] = subscription
        self._states[endpoint] = endpoint.state
        self._tasks[endpoint] = asyncio.create_task(
            _keep_running(subscription), name=f"follow {endpoint.spec.address.authority}"
        )

    def _stop(self, endpoint: Endpoint) -> None:
        subscription = self._subscriptions.pop(endpoint, None)
        if subscription is not None:
            subscription.stop()
            self._tasks.pop(endpoint).cancel()


async def _keep_running(subscription: Subscription) -> None:
    """A mistake of ours about one engine must not cost us the others, nor this one for good."""
    while True:
        try:
            await subscription.run()
        except Exception:
            logger.exception("Unhandled error in an engine's load report")
            await asyncio.sleep(STUMBLE_PAUSE_S)
