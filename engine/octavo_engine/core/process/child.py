"""The engine core as a process of its own: `python -m octavo_engine.core.process.child --fd N`.

The main thread loads the model and runs the step loop. A second thread reads the socket, answers
pings with the loop's own counters, so that a hung loop is seen, and ends the process when the
parent is gone.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from octavo_common.logs import set_up_logging
from octavo_engine.core.loop import CoreLoop
from octavo_engine.core.process import wire
from octavo_engine.core.process.frames import frames_of
from octavo_engine.errors import OctavoError, machine_fault

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from octavo_engine.config import EngineConfig
    from octavo_engine.core.core_engine import CoreEngine
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.core.loop import Inbox

logger = logging.getLogger("octavo_engine.core.process.child")  # __name__ is __main__ in the child

EXIT_PARENT_GONE = 4  # also when the parent talks nonsense
EXIT_FAILED = 3
STACK_DUMP_SIGNAL = signal.SIGUSR1
_PROGRESS_EVERY_S = 0.1
_IMPORTED_AHEAD = (
    "octavo_engine.core.build_core",
    "octavo_engine.backends.native.backend",
    "octavo_engine.weights.gguf_parts",
)


class Build(Protocol):
    """`core.build_core.build_core`, or a test's own."""

    def __call__(
        self, config: EngineConfig, *, progress: Callable[[int, int], None]
    ) -> tuple[CoreEngine, ModelInfo]: ...


class CoreProcess:
    """One engine core at its end of the socket."""

    def __init__(self, connection: socket.socket, build: Build) -> None:
        self._connection = connection
        self._build = build
        self._inbox: Inbox = SimpleQueue()
        self._sending = threading.Lock()
        self._engine: CoreEngine | None = None  # once loaded
        self._progress_at = 0.0

    def run(self) -> int:
        """The exit code."""
        reader = wire.MessageReader(wire.TO_CORE)
        messages: list[wire.ToCore] = []
        while not messages:
            messages = self._receive(reader)
        first, *rest = messages
        if not isinstance(first, wire.Configure):
            logger.error("The first frame was no configuration")
            return EXIT_PARENT_GONE
        set_up_logging(first.log_format, first.log_level)
        for message in rest:
            self._take(message)
        threading.Thread(target=self._listen, args=(reader,), name="octavo-io", daemon=True).start()
        try:
            self._serve(first.config)
        except OctavoError as error:
            self.send(wire.Fatal(type(error).__name__, str(error)))
            return EXIT_FAILED
        except Exception as error:
            fault = machine_fault(error)
            if not fault:
                logger.exception("The engine core failed")
            self.send(wire.Fatal("OctavoError", fault or f"{type(error).__name__}: {error}"))
            return EXIT_FAILED
        return 0

    def _serve(self, config: EngineConfig) -> None:
        engine, info = self._build(config, progress=self._report_progress)
        self._engine = engine
        try:
            self.send(wire.Ready(info))
            CoreLoop(engine, self._inbox, self.send).run()
        finally:
            self._engine = None
            engine.close()

    def stop_when_idle(self) -> None:
        """Safe in a signal handler."""
        self._inbox.put(wire.Shutdown(graceful=True))

    def send(self, message: wire.FromCore) -> None:
        frames, failed = frames_of(message)
        if failed:
            self._inbox.put(wire.Abort(failed))
        try:
            with self._sending:
                for frame in frames:
                    self._connection.sendall(frame)
        except OSError:
            self._parent_gone()

    def _listen(self, reader: wire.MessageReader[wire.ToCore]) -> None:
        while True:
            for message in self._receive(reader):
                self._take(message)

    def _receive(self, reader: wire.MessageReader[wire.ToCore]) -> list[wire.ToCore]:
        try:
            data = self._connection.recv(1 << 16)
            if data:
                return reader.feed(data)
        except OSError:
            data = b""
        except wire.WireError:
            logger.exception("The parent sent something that is no message")
        self._parent_gone()
        return []

    def _take(self, message: wire.ToCore) -> None:
        if isinstance(message, wire.CorePing):
            self.send(self._pong(message.number))
        else:
            self._inbox.put(message)

    def _pong(self, number: int) -> wire.Pong:
        engine = self._engine
        if engine is None:  # loading, or leaving
            return wire.Pong(number, steps=0, step_age_s=0.0, expected_s=0.0)
        return wire.Pong(number, *engine.heartbeat.pulse())

    def _report_progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._progress_at >= _PROGRESS_EVERY_S:
            self._progress_at = now
            self.send(wire.CoreProgress(done, total))

    def _parent_gone(self) -> None:
        """The API server is gone, and the main thread may hang: exit without unwinding."""
        os._exit(EXIT_PARENT_GONE)


def main(argv: list[str] | None = None, build: Build | None = None) -> int:
    parser = argparse.ArgumentParser(description="engine core; started by the API server")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the API server")
    parser.add_argument("--expert-file", type=int, help="memory of cores that share the experts")
    args = parser.parse_args(argv)
    connection = socket.socket(fileno=args.fd)
    core = CoreProcess(connection, build or partial(_build_core, expert_file=args.expert_file))

    def on_sigterm(_signal: int, _frame: FrameType | None) -> None:
        core.stop_when_idle()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once

    # A hung loop can still say where it hangs: the supervisor asks before it kills.
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the parent decides
    # One that is idle still computes experts for the others, so the parent decides this too.
    shares_experts = args.expert_file is not None
    signal.signal(signal.SIGTERM, signal.SIG_IGN if shares_experts else on_sigterm)
    if build is None:
        _import_ahead(connection)
    return core.run()


def _build_core(
    config: EngineConfig, *, progress: Callable[[int, int], None], expert_file: int | None
) -> tuple[CoreEngine, ModelInfo]:
    from octavo_engine.core.build_core import build_core

    return build_core(config, progress=progress, expert_file=expert_file)


def _import_ahead(connection: socket.socket) -> None:
    """What most settings need, until the first ones come."""
    coming = select.poll()  # not select: a busy server's child may be given a file above 1024
    coming.register(connection, select.POLLIN)
    for name in _IMPORTED_AHEAD:
        if coming.poll(0):
            return
        with suppress(
            ImportError
        ):  # such as of an extension that was not built: `build` reports it
            importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
