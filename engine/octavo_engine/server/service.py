"""What all routes share: engine, settings, metrics, and whether work may still come in."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ModelUnknown, OctavoError, QueueFull
from octavo_engine.metrics import EngineMetrics, MetricsSnapshot
from octavo_engine.server.admin.pause import PauseState
from octavo_engine.server.admin.reload import KeyFiles
from octavo_engine.server.admin.sleep import SleepState
from octavo_engine.server.generation.inflight import InFlightRequests
from octavo_engine.server.http.errors import HttpError, unavailable
from octavo_engine.server.memory import MemoryRelease
from octavo_engine.server.openai.chat.dialect import Dialect, choose, known_formats
from octavo_engine.server.openai.responses.store import ResponseStore
from octavo_engine.server.routers.push_stream import SubscriberHub
from octavo_engine.server.routers.route_labels import Labeller

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import CoreHealth, ModelInfo
    from octavo_engine.core.kv_events.residency_feed import ResidencyFeed
    from octavo_engine.core.pooling.async_pooling import PoolingItem
    from octavo_engine.core.text.output_stream import InlineSink
    from octavo_engine.core.text.outputs import RequestOutput
    from octavo_engine.core.text.resumed import ResumedOutput
    from octavo_engine.server.openai.batches.runner import BatchRunner
    from octavo_engine.server.settings import ServerSettings
    from octavo_engine.state.labels import Labels
    from octavo_engine.state.outputs import EngineStats
    from octavo_engine.state.pooling import PoolingParams
    from octavo_engine.state.sampling_params import SamplingParams
    from octavo_engine.tokenization.tokenizer import Tokenizer
    from octavo_engine.tracing import EngineTracing


T = TypeVar("T")

_MAX_NAMED = 10  # models that a refusal lists


class ServedEngine(Protocol):
    """What the API server asks of an engine; AsyncEngine is one."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def info(self) -> ModelInfo:
        """Known once the model is loaded."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def residency(self) -> ResidencyFeed: ...
    def health(self) -> CoreHealth: ...
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        told: Sequence[ResumedOutput] = (),
        labels: Labels | None = None,
        stream: bool = True,
        tap: InlineSink[RequestOutput] | None = None,
        group: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """News until finished; closing it aborts. `told`: only what comes after that. What `tap`
        takes does not come here. `group`: the request that several calls are parts of."""

    async def pool(
        self,
        items: Sequence[PoolingItem],
        params: PoolingParams,
        *,
        request_id: str,
        deadline_s: float | None = None,
    ) -> list[NDArray[np.float32]]:
        """One array an item; cancelling it aborts."""

    def settle_seed(self, seed: int | None) -> int:
        """The seed that a request will use: this one, or a new one."""

    async def abort(self, request_id: str) -> bool:
        """End a generation with what it has; false if there is none of that id."""

    async def reset_prefix_cache(self) -> None: ...
    async def sleep(self, *, on: bool, level: int = 1) -> None:
        """Give memory back, or take it again; only while nothing runs."""

    async def start_profile(self) -> None:
        """Record every step from now on."""

    async def stop_profile(self, path: str) -> int:
        """Write what was recorded; how many events that is. Raises a RequestError."""

    async def ready(self) -> ModelInfo: ...
    async def drain(self, timeout_s: float) -> bool: ...
    async def stop(self) -> None: ...


class Service:
    """One engine behind one port. Belongs to the event loop."""

    def __init__(
        self, engine: ServedEngine, settings: ServerSettings, key_files: KeyFiles | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.tracing: EngineTracing | None = (
            None  # set by the application, where there is a collector
        )
        self.started_at = int(time.time())
        self.names = engine.config.names
        self.describe: Callable[[], bytes] = bytes  # /openapi.json; set by the application
        self.guard = (key_files or KeyFiles(settings)).guard
        self.metrics = EngineMetrics(
            self.names[0], self._snapshot, vllm_names=settings.vllm_metrics
        )
        self.in_flight = 0  # generation requests between admission and their last byte
        self.is_draining = False  # set by start_draining
        self.drain_asked = asyncio.Event()  # by the admin route; the process acts on it
        self.hub = SubscriberHub(self)
        self.running = InFlightRequests()
        self.responses = ResponseStore(settings.limits)
        self.sleep = SleepState(self)
        self.pause = PauseState(self)
        self.memory = MemoryRelease()
        self.batches: BatchRunner | None = None  # set by the application, where files are kept
        self._labeller: Labeller | None = None
        self._formats = known_formats(settings)
        self._dialect: Dialect | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def labeller(self) -> Labeller:
        """Made when the first request needs it: the tokenizer must be there."""
        if self._labeller is None:
            engine = self.engine
            self._labeller = Labeller(engine.tokenizer, engine.info.vocab_size, engine.residency)
        return self._labeller

    @property
    def dialect(self) -> Dialect:
        """How the model writes tool calls and thoughts; told once the model is loaded."""
        if self._dialect is None:
            self._dialect = choose(self.settings, self.engine.tokenizer, self._formats)
        return self._dialect

    # ── admission ──

    def admit(self) -> None:
        """May work come in now? Raises 503 with Retry-After otherwise."""
        if self.is_draining:
            raise unavailable("draining", "The server is shutting down.", retry_after_s=1)
        self.sleep.check()
        health = self.engine.health()
        match health.state:
            case "ready":
                pass
            case "loading":
                percent = f"{health.progress:.0%}"
                raise unavailable(
                    "loading", f"The model is being loaded ({percent} done).", retry_after_s=1
                )
            case "draining":
                raise unavailable("draining", "The server is shutting down.", retry_after_s=1)
            case "stalled":
                raise unavailable(
                    "engine_stalled", "The engine makes no progress at the moment.", retry_after_s=5
                )
            case _:
                raise unavailable(
                    "engine_dead", "The engine is down and is being restarted.", retry_after_s=5
                )
        limit = self.settings.limits.max_concurrent_requests
        if self.in_flight >= limit:
            raise QueueFull(
                f"{limit} requests are in flight already", retry_after_s=self.retry_after_s
            )

    @property
    def retry_after_s(self) -> int:
        """About how long the engine needs, at its present speed, for the prompts that wait."""
        stats = self.engine.stats
        speed = stats.prefill_tokens_per_s
        return min(max(math.ceil(stats.queued_tokens / speed), 1), 60) if speed else 1

    def start_draining(self) -> None:
        """No new work from here on; routers are told."""
        self.is_draining = True
        self.pause.end()  # what waits is refused as all that comes now
        self.hub.drain(self.settings.shutdown_timeout_s)

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
        own = self.settings.pod_uid
        if own and uid and uid != own:
            raise HttpError(
                421, "This request is meant for a pod that is not here any more.", code="wrong_pod"
            )

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises ModelUnknown (404)."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise ModelUnknown(
                f"The model `{name[:200]}` does not exist. There are: "
                + ", ".join(f"`{known}`" for known in self.names[:_MAX_NAMED])
                + (
                    f" and {len(self.names) - _MAX_NAMED} more." if self.names[_MAX_NAMED:] else "."
                ),
                param="model",
            )
        return name

    @property
    def is_saturated(self) -> bool:
        return self.engine.stats.num_waiting >= self.engine.config.scheduler.max_queue

    def _snapshot(self) -> MetricsSnapshot:
        health = self.engine.health()
        stats = self.engine.stats
        state = "draining" if self.is_draining and health.state == "ready" else health.state
        load_s = 0.0
        if health.state != "loading":
            info = optional(lambda: self.engine.info)
            load_s = info.load_seconds if info is not None else 0.0
        return MetricsSnapshot(
            stats=stats, state=state, load_s=load_s, block_size=BLOCK_SIZE,
            kv_cache_dtype=self.engine.config.kv_cache_dtype, is_sleeping=self.sleep.is_on,
        )  # fmt: skip


def optional(get: Callable[[], T]) -> T | None:
    """What is known only once the model is loaded, or None."""
    try:
        return get()
    except (OctavoError, AttributeError):
        return None
