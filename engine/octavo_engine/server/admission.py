"""Whether work may come in, and what of it is in flight."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from octavo_engine.errors import QueueFull
from octavo_engine.server.http.errors import HttpError, unavailable

if TYPE_CHECKING:
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.server.settings import ServerSettings


class RequestAdmission:
    """Of one server. Belongs to the event loop."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self._engine = engine
        self._limit = settings.limits.max_concurrent_requests
        self._pod_uid = settings.pod_uid
        self.in_flight = 0  # generation requests between admission and their last byte
        self.is_draining = False
        self.is_sleeping = False
        self.awaits_adapters = bool(settings.lora_modules)  # that are served from the start
        self.drain_requested = asyncio.Event()  # by the admin route; the process acts on it
        self._idle = asyncio.Event()
        self._idle.set()

    def admit(self) -> None:
        """May work come in now? Raises 503 with Retry-After otherwise."""
        if self.is_draining:
            raise unavailable("draining", "The server is shutting down.", retry_after_s=1)
        if self.is_sleeping:
            raise unavailable(
                "sleeping", "The server is sleeping; POST /wake_up to wake it.", retry_after_s=5
            )
        health = self._engine.health()
        if health.state == "ready" and self.awaits_adapters:
            raise unavailable("loading", "The adapters are loading.", retry_after_s=1)
        match health.state:
            case "ready":
                pass
            case "loading":
                percent = f"{health.progress:.0%}"
                raise unavailable(
                    "loading", f"The model is loading ({percent} done).", retry_after_s=1
                )
            case "draining":
                raise unavailable("draining", "The server is shutting down.", retry_after_s=1)
            case "stalled":
                raise unavailable(
                    "engine_stalled", "The engine is not making progress.", retry_after_s=5
                )
            case _:
                raise unavailable(
                    "engine_dead", "The engine is down and is being restarted.", retry_after_s=5
                )
        limit = self._limit
        if self.in_flight >= limit:
            raise QueueFull(
                f"{limit} requests are in flight already", retry_after_s=self.retry_after_s
            )

    @property
    def retry_after_s(self) -> int:
        """About how long the engine needs, at its present speed, for the prompts that wait."""
        stats = self._engine.stats
        speed = stats.prefill_tokens_per_s
        return min(max(math.ceil(stats.queued_tokens / speed), 1), 60) if speed else 1

    def enter(self) -> None:
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Returns when no generation request is in flight."""
        await self._idle.wait()

    def check_pod(self, uid: str) -> None:
        """Addresses of pods are used again: no prompt may reach a stranger. Raises 421."""
        own = self._pod_uid
        if own and uid and uid != own:
            raise HttpError(
                421, "This request is for a pod that no longer has this address.", code="wrong_pod"
            )

    @property
    def is_saturated(self) -> bool:
        return self._engine.stats.num_waiting >= self._engine.config.max_queue
