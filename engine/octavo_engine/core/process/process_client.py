"""The engine core in a supervised child process: what dies or hangs is reported and restarted."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from octavo_engine.core.info import CoreHealth
from octavo_engine.core.process.core_handle import CoreHandle
from octavo_engine.core.process.spawn import CORE_COMMAND, spawn_core
from octavo_engine.core.process.supervision import Restarts, Timing
from octavo_engine.errors import EngineDead, OctavoError, machine_fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.process import wire
    from octavo_engine.core.process.client import Listener
    from octavo_engine.core.process.expert_cores import ExpertCores
    from octavo_engine.core.process.spawn import SpawnedCore

logger = logging.getLogger(__name__)


class ProcessClient:
    """An EngineClient that keeps one core process alive. Make it on the event loop.

    The first core is the one that was `spawned` before, if any.
    """

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        *,
        timing: Timing | None = None,
        command: Sequence[str] = CORE_COMMAND,
        expert_cores: ExpertCores | None = None,
        spawned: SpawnedCore | None = None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._timing = timing or Timing()
        self._command = command
        self._expert_cores = expert_cores
        self._spawned = spawned
        self._core: CoreHandle | None = None
        self._settled = asyncio.Event()  # the first start succeeded or failed
        self._start_error: OctavoError | None = None
        self._info: ModelInfo | None = None  # of the first start
        self._down = ""  # why there is no core; also after it was given up
        self._supervisor = asyncio.create_task(self._supervise(), name="octavo-supervisor")

    @property
    def pid(self) -> int | None:
        """Of the core at hand."""
        return None if self._core is None else self._core.process.pid

    async def ready(self) -> ModelInfo:
        await self._settled.wait()
        if self._info is None:
            raise self._start_error or OctavoError("the engine was stopped while it loaded")
        return self._info

    def send(self, message: wire.ToEngine) -> None:
        if self._core is not None and not self._core.is_loading:
            self._core.send(message)

    def health(self) -> CoreHealth:
        core = self._core
        if core is None:
            return (
                CoreHealth("dead", self._down, restarts=not self._supervisor.done())
                if self._down
                else CoreHealth("loading", progress=0.0)
            )
        if core.ended.is_set():
            return CoreHealth("dead", "the engine core ended")
        stall = core.stall(time.monotonic())
        if stall:
            return CoreHealth("stalled", stall)
        if core.is_loading:
            return core.listener.loading()
        return CoreHealth("ready")

    async def stop(self) -> None:
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])
        self._settled.set()
        core, self._core = self._core, None
        self._down = "the engine was stopped"
        if core is not None:
            await core.stop(self._timing.stop)

    async def _supervise(self) -> None:
        try:
            await self._keep_alive()
        except Exception as error:  # such as no memory for a fork: supervision has ended
            fault = machine_fault(error)
            if fault:
                self._down = f"the engine's process cannot be started: {fault}"
                logger.error("Lost the engine core: %s", self._down)
            else:
                logger.exception("Supervision of the engine core failed")
                self._down = f"supervision of the engine core failed: {error}"
            self._start_error = OctavoError(self._down)
            self._settled.set()
            self._listener.on_lost(EngineDead(self._down))

    async def _keep_alive(self) -> None:
        restarts = Restarts(self._timing)
        while True:
            core = await self._launch()
            self._core = core
            await self._attend(core)
            how = await core.reap()
            self._core = None
            reason = f"{core.killed_for}; it was killed" if core.killed_for else how
            if self._info is None:  # what fails at the first start would fail again
                self._start_error = core.listener.fatal or OctavoError(f"{reason} while it loaded")
                self._down = str(self._start_error)
                self._settled.set()
                return
            delay = restarts.failed(time.monotonic() - core.started_at)
            if delay is None:
                self._down = _given_up(reason, restarts.fast_failures)
            else:
                self._down = f"{reason}; it is started again in {delay:g} s"
            logger.error("Lost the engine core: %s", self._down)
            retry_after = None if delay is None else max(1, round(delay) + 1)
            self._listener.on_lost(EngineDead(self._down, retry_after_s=retry_after))
            if delay is None:
                return
            await asyncio.sleep(delay)

    async def _launch(self) -> CoreHandle:
        others = self._expert_cores
        file = None if others is None else others.file()
        spawned, self._spawned = self._spawned or spawn_core(self._command, file), None
        core = await CoreHandle.configure(spawned, self._config, self._listener, self._timing)
        if others is not None:
            others.add(core)
        return core

    async def _attend(self, core: CoreHandle) -> None:
        """Ping until the core ends."""
        timing = self._timing
        tick = timing.ping / 2
        next_ping = looked_at = time.monotonic()
        stall = ""
        while not core.ended.is_set():
            now = time.monotonic()
            if now - looked_at > 2 * tick + 1.0:
                core.watch.forgive(now)
            looked_at = now
            if now >= next_ping:
                core.ping(now)
                next_ping = now + timing.ping
            self._note_start(core)
            before, stall = stall, core.stall(now)
            if stall and not before:
                logger.warning("The engine core seems to hang: %s; its stacks follow", stall)
                core.dump_stacks()
            if not core.killed_for and core.watch.must_be_killed(now, stall):
                logger.error("Killing the engine core: %s", stall)
                core.kill(stall)
            with suppress(TimeoutError):
                async with asyncio.timeout(tick):
                    await (core.changed if core.is_loading else core.ended).wait()
        self._note_start(core)  # it may have come and gone within one tick
        if self._expert_cores is not None:
            self._expert_cores.remove(core, self._config.data_parallel_rank)

    def _note_start(self, core: CoreHandle) -> None:
        if self._info is None and core.listener.info is not None:
            self._info = core.listener.info
            self._settled.set()


def _given_up(reason: str, failures: int) -> str:
    """Where none is started again, there is no row of failures to speak of."""
    return reason if failures == 1 else f"{reason}; given up after {failures} failures in a row"
