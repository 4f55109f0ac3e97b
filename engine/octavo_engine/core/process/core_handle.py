"""One run of the engine core as a child process: its pid, its socket, what it said last."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import TYPE_CHECKING, cast

from octavo_common.logs import format_in_use
from octavo_engine.core.process import wire
from octavo_engine.core.process.child import STACK_DUMP_SIGNAL
from octavo_engine.core.process.client import CoreListener
from octavo_engine.core.process.heartbeat import HeartbeatState
from octavo_engine.core.process.supervision import HangDetector

if TYPE_CHECKING:
    import subprocess

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.process.client import Listener
    from octavo_engine.core.process.spawn import SpawnedCore
    from octavo_engine.core.process.supervision import Timing

logger = logging.getLogger(__name__)


class CoreHandle(asyncio.Protocol):
    """Made by `configure`; `ended` is set when the socket closes, which a death does at once."""

    def __init__(
        self, process: subprocess.Popen[bytes], listener: Listener, timing: Timing
    ) -> None:
        self.process = process
        self.started_at = time.monotonic()
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()  # it got ready, or ended
        self.listener = CoreListener(listener)
        self.watch = HangDetector(timing)
        self.killed_for = ""
        self._reader = wire.MessageReader(wire.FROM_CORE)
        self._transport: asyncio.Transport | None = None
        self._pings = 0

    @classmethod
    async def configure(
        cls, spawned: SpawnedCore, config: EngineConfig, listener: Listener, timing: Timing
    ) -> CoreHandle:
        """Watch over a core that was started, and have it load. Owns it, also if it raises."""
        core = cls(spawned.process, listener, timing)
        ours = spawned.connection
        ours.setblocking(False)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: core, sock=ours)
        except BaseException:
            spawned.drop()
            raise
        level = logging.getLogger("octavo_engine").getEffectiveLevel()
        core.send(wire.Configure(config, level, format_in_use()))
        return core

    # ── what the event loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not a check: uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except wire.WireError:
            logger.exception("The engine core sent something that is no message")
            self.kill()
            return
        for message in messages:
            if isinstance(message, wire.Pong):
                self.watch.ponged(_pulse(message))
                continue
            self.listener.receive(message)
            if isinstance(message, wire.Ready):
                self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self.changed.set()

    # ── what the supervisor calls ──

    @property
    def is_loading(self) -> bool:
        return self.listener.info is None

    def send(self, message: wire.ToCore) -> None:
        if self._transport is not None and not self.ended.is_set():
            self._transport.write(wire.encode(message))

    def ping(self, now: float) -> None:
        self._pings += 1
        self.watch.pinged(now)
        self.send(wire.CorePing(self._pings))

    def stall(self, now: float) -> str:
        return self.watch.stall(now, loading=self.is_loading)

    def dump_stacks(self) -> None:
        """Have it write to stderr where each of its threads is; a stopped one does so later."""
        if not self.is_loading and self.process.poll() is None:
            self.process.send_signal(STACK_DUMP_SIGNAL)

    def kill(self, why: str = "") -> None:
        self.killed_for = self.killed_for or why
        self.process.kill()  # SIGKILL: it works on a stopped process too

    async def reap(self) -> str:
        """Wait for the end of the process; says how it ended."""
        self._close()
        code = await asyncio.to_thread(self.process.wait)
        if self.listener.fatal is not None:
            return f"the engine core ended: {self.listener.fatal}"
        if code >= 0:
            return f"the engine core ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (is the memory limit too small?)" if name == "SIGKILL" else ""
        return f"the engine core was ended by {name}{hint}"

    async def stop(self, patience_s: float) -> None:
        """Ask it to end, then make it."""
        self.send(wire.Shutdown())
        try:
            async with asyncio.timeout(patience_s):
                await self.ended.wait()
        except TimeoutError:
            logger.warning("The engine core did not end within its time; it is killed")
            self.kill()
        await self.reap()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _pulse(pong: wire.Pong) -> HeartbeatState:
    return HeartbeatState(pong.steps, pong.step_age_s, pong.expected_s, pong.slowest_s)
