"""The parts that one server is made of; routes take those that they need."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

from octavo_common.clock_watch import ClockWatch
from octavo_common.process_tree import cpu_seconds
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.core.media.held import HeldMedia
from octavo_engine.core.media.picture_sources import PictureSources
from octavo_engine.errors import OctavoError
from octavo_engine.metrics import EngineMetrics, MetricsSnapshot
from octavo_engine.server.admin.pause import PauseState
from octavo_engine.server.admin.reload import KeyFiles
from octavo_engine.server.admin.sleep import SleepState
from octavo_engine.server.admission import RequestAdmission
from octavo_engine.server.generation.inflight import InFlightRequests
from octavo_engine.server.http.tls import ClientNames
from octavo_engine.server.memory import MemoryRelease
from octavo_engine.server.openai.responses.store import ResponseStore
from octavo_engine.server.routers.push_stream import SubscriberHub
from octavo_engine.server.served_model import ServedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.server.openai.batches.runner import BatchRunner
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.server.settings import ServerSettings
    from octavo_engine.tracing import EngineTracing


T = TypeVar("T")


class Service:
    """One engine behind one port: its parts are made and connected here, and do the work."""

    def __init__(
        self, engine: ServedEngine, settings: ServerSettings, key_files: KeyFiles | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.tracing: EngineTracing | None = (
            None  # set by the application, where there is a collector
        )
        self.started_at = int(time.time())
        self.describe: Callable[[], bytes] = bytes  # /openapi.json; set by the application
        self.guard = (key_files or KeyFiles(settings)).guard
        self.client_names = ClientNames.of(settings)
        self.model = ServedModel(engine, settings)
        self.admission = RequestAdmission(engine, settings)
        self.metrics = EngineMetrics(
            self.model.names[0], self._snapshot, vllm_names=settings.vllm_metrics
        )
        self.hub = SubscriberHub(engine, self.admission, self.metrics, settings.pod_uid)
        self.model.adapters.on_changed = lambda: self.hub.set_adapters(self.model.adapters.digests)
        self.running = InFlightRequests()
        self.picture_sources = PictureSources(
            settings.allowed_media_domains, settings.allowed_local_media_path
        )
        self.held_media = HeldMedia()
        self.responses = ResponseStore(settings.limits)
        self.sleep = SleepState(engine, self.admission, self.running)
        self.pause = PauseState(engine, self.admission, self.running, settings.request_timeout_s)
        self.memory = MemoryRelease()
        self.clock = ClockWatch()
        self.batches: BatchRunner | None = None  # set by the application, where files are kept

    def start_draining(self) -> None:
        """No new work from here on; routers are informed."""
        self.admission.is_draining = True
        self.pause.end()  # what waits is refused as all that comes now
        self.hub.drain(self.settings.shutdown_timeout_s)

    @property
    def media_hang(self) -> str:
        """Why pictures or sounds make no progress, while all else does; empty: they do."""
        pictures = optional(lambda: self.engine.pictures)
        return "" if pictures is None else pictures.hang

    def _snapshot(self) -> MetricsSnapshot:
        health, config = self.engine.health(), self.engine.config
        stats = self.engine.stats
        state = (
            "draining" if self.admission.is_draining and health.state == "ready" else health.state
        )
        if state == "ready" and self.media_hang:
            state = "stalled"
        load_s = 0.0
        if health.state != "loading":
            info = optional(lambda: self.engine.info)
            load_s = info.load_seconds if info is not None else 0.0
        pictures = optional(lambda: self.engine.pictures)
        return MetricsSnapshot(
            stats=stats, state=state, load_s=load_s, cpu_s=cpu_seconds(os.getpid()),
            block_size=BLOCK_SIZE,
            kv_cache_dtype=config.kv_cache_dtype,
            is_sleeping=self.admission.is_sleeping,
            max_loras=config.max_loras if config.enable_lora else 0,
            mm_pending=0 if pictures is None else pictures.num_waiting,
            mm_preprocess_s=0.0 if pictures is None else pictures.seconds,
            num_clock_jumps=self.clock.num_jumps,
        )  # fmt: skip


def optional(get: Callable[[], T]) -> T | None:
    """What is known only once the model is loaded, or None."""
    try:
        return get()
    except (OctavoError, AttributeError):
        return None
