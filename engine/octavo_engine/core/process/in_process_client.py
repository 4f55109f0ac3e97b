"""The engine core in a thread of this process: for the simulator, and where one process is wanted.

There is no supervision: a thread cannot be killed. A core that fails or hangs is reported and stays
so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from octavo_engine.core.info import CoreHealth
from octavo_engine.core.loop import CoreLoop
from octavo_engine.core.process import wire
from octavo_engine.core.process.client import CoreListener
from octavo_engine.errors import EngineDead, OctavoError, machine_fault

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.core.core_engine import CoreEngine
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.loop import Inbox
    from octavo_engine.core.process.child import Build
    from octavo_engine.core.process.client import Listener

logger = logging.getLogger(__name__)

_PATIENCE_S = 3.0  # a step may always take so long
_STOP_S = 5.0  # for the step at hand to end


class InProcessClient:
    """An EngineClient whose core shares this process."""

    def __init__(self, config: EngineConfig, listener: Listener, *, build: Build) -> None:
        self._config = config
        self._listener = listener
        self._build = build
        self._news = CoreListener(listener)
        self._inbox: Inbox = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._settled = asyncio.Event()  # loaded, or failed
        self._ended = False
        self._stopping = False
        self._engine: CoreEngine | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-core", daemon=True)
        self._thread.start()

    async def ready(self) -> ModelInfo:
        await self._settled.wait()
        if self._news.info is None:
            raise self._news.fatal or OctavoError("the engine was stopped while it loaded")
        return self._news.info

    def send(self, message: wire.ToEngine) -> None:
        self._inbox.put(message)

    def health(self) -> CoreHealth:
        if self._ended:
            return CoreHealth(
                "dead",
                f"the engine core ended: {self._news.fatal or 'it was stopped'}",
                restarts=False,
            )
        if self._news.info is None or self._engine is None:
            return self._news.loading()
        pulse = self._engine.heartbeat.pulse()
        if pulse.is_stalled(_PATIENCE_S):
            return CoreHealth("stalled", f"a step has taken {pulse.step_age_s:.1f} s so far")
        return CoreHealth("ready")

    async def stop(self) -> None:
        self._stopping = True
        self._inbox.put(wire.Shutdown())
        await asyncio.to_thread(self._thread.join, _STOP_S)
        if self._thread.is_alive():
            logger.warning("The engine thread did not end within %.0f s", _STOP_S)

    def _run(self) -> None:
        try:
            engine, info = self._build(self._config, progress=self._report_progress)
            self._engine = engine
            self._emit(wire.Ready(info))
            try:
                CoreLoop(engine, self._inbox, self._emit).run()
            finally:
                engine.close()
        except OctavoError as error:
            self._emit(wire.Fatal(type(error).__name__, str(error)))
        except Exception as error:
            fault = machine_fault(error)
            if not fault:
                logger.exception("The engine core failed")
            self._emit(wire.Fatal("OctavoError", fault or f"{type(error).__name__}: {error}"))
        self._on_loop(self._end)

    def _report_progress(self, done: int, total: int) -> None:
        self._emit(wire.CoreProgress(done, total))

    def _emit(self, message: wire.FromCore) -> None:
        self._on_loop(self._receive, message)

    def _on_loop(self, callback, *args) -> None:  # type: ignore[no-untyped-def]
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the event loop is closed: there is no listener any more
            self._inbox.put(wire.Shutdown())

    def _receive(self, message: wire.FromCore) -> None:
        if self._stopping:
            return
        self._news.receive(message)
        if isinstance(message, wire.Ready):
            self._settled.set()

    def _end(self) -> None:
        self._ended = True
        self._settled.set()
        if not self._stopping:
            reason = self._news.fatal or "it was stopped"
            self._listener.on_lost(EngineDead(f"the engine core ended: {reason}"))
