"""The life of a server process: the port opens at once, the model loads, work, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Protocol

from uvicorn.config import Config
from uvicorn.server import Server

from octavo_common.loop_watch import LoopWatch
from octavo_engine import __version__
from octavo_engine.server.admin.reload import KeyFiles, Reloader
from octavo_engine.server.admin.statistics import log_statistics
from octavo_engine.server.app import build_admin_app, build_app
from octavo_engine.server.http.connection import http_protocol
from octavo_engine.server.http.tls import TlsFiles
from octavo_engine.server.openai.batches.shelf import FileStore
from octavo_engine.server.openai.batches.storage import Storage
from octavo_engine.server.served_adapters import parse_modules
from octavo_engine.tokenization.threads import hung_text, return_freed_memory
from octavo_engine.tracing import make_tracing

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Generator

    from starlette.applications import Starlette

    from octavo_engine.core.info import CoreHealth, ModelInfo
    from octavo_engine.encryption import EncryptionKeys
    from octavo_engine.server.served_adapters import AdapterModule
    from octavo_engine.server.served_engine import ServedEngine
    from octavo_engine.server.service import Service
    from octavo_engine.server.settings import ServerSettings

logger = logging.getLogger("octavo.server")

KEEP_ALIVE_S = 75  # longer than the idle time of common load balancers
LAST_WRITES_S = 5.0  # for answers that were complete when the drain ended
PROGRESS_INTERVAL_S = 0.1
LOOP_TICK_S = 1.0
LOOP_DUMP_S = 4.0  # of standing still: the stacks are logged
CLOCK_LOOK_S = 1.0
TEXT_LOOK_S = 0.5  # between two looks at the threads that read texts


class LifecycleObserver(Protocol):
    """Reports how the start goes; the command line has one."""

    def loading(self, health: CoreHealth) -> None: ...
    def ready(self, info: ModelInfo) -> None: ...
    def draining(self, in_flight: int) -> None: ...


async def serve(
    start: Callable[[], Awaitable[ServedEngine]],
    settings: ServerSettings,
    listener: socket.socket,
    observer: LifecycleObserver,
    keys: EncryptionKeys | None = None,
    *,
    admin_listener: socket.socket | None = None,
) -> None:
    """Returns when drained after SIGTERM, SIGINT or a call of the drain route; a second signal ends
    the process at once. SIGHUP reads keys and certificates again. Raises the ConfigError or
    ModelError that ended the start."""
    return_freed_memory()
    key_files = KeyFiles(settings)
    tracing = make_tracing(
        settings.otlp_endpoint,
        sample_ratio=settings.otlp_sample_ratio,
        version=__version__,
        instance=settings.pod_uid,
    )
    tls = TlsFiles(settings) if settings.ssl_certfile else None
    shelf = None
    if settings.files_dir:
        shelf = FileStore(settings.files_dir, settings.limits, storage=Storage(keys))
    engine = await start()
    modules = parse_modules(settings.lora_modules, engine.config.names)
    app = build_app(engine, settings, key_files, tracing, shelf)
    service: Service = app.state.service
    servers = {make_server(app, settings, tls): listener}
    if admin_listener is not None:
        servers[make_server(build_admin_app(service), settings, tls)] = admin_listener
    reloader = Reloader([key_files, *([tls] if tls else [])])
    stop = asyncio.Event()
    with _signals(stop, reloader):
        reloading = asyncio.create_task(reloader.run(), name="octavo-reload")
        watching = asyncio.create_task(_watch_loop(), name="octavo-loop-watch")
        texts = asyncio.create_task(_watch_texts(service), name="octavo-text-watch")
        clock = asyncio.create_task(_watch_clock(service), name="octavo-clock-watch")
        helpers = [reloading, watching, texts, clock]
        serving = [
            asyncio.create_task(server.serve(sockets=[own]), name="octavo-http")
            for server, own in servers.items()
        ]
        try:
            if await _load(engine, observer, stop, service, modules):
                if service.batches is not None:
                    service.batches.start()
                if settings.log_stats:
                    statistics = asyncio.create_task(log_statistics(engine), name="octavo-stats")
                    helpers.append(statistics)
                await _first(stop.wait(), service.admission.drain_requested.wait())
                await _drain(engine, service, settings.shutdown_timeout_s, observer)
        finally:
            service.start_draining()
            if service.batches is not None:
                await service.batches.stop()
            await engine.stop()
            for server in servers:
                server.leave()
            await asyncio.gather(*serving)
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


async def _watch_loop() -> None:
    """Until it is cancelled. While the loop stands still, probes are not answered."""
    watched = logging.getLogger("octavo.server.loop")
    async with LoopWatch(watched, tick_s=LOOP_TICK_S, dump_s=LOOP_DUMP_S):
        await asyncio.Event().wait()


async def _watch_texts(service: Service) -> None:
    """Until it is cancelled. Where a text hangs, routers are sent away, so that they send nothing
    here; `health` says why, and once for each hang the log has the stacks."""
    before = ""
    while True:
        await asyncio.sleep(TEXT_LOOK_S)
        hang = hung_text()
        if hang and not before:
            logger.error("Reading a text hangs: %s; the stacks of all threads follow", hang)
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
            service.hub.on_lost()
        before = hang


async def _watch_clock(service: Service) -> None:
    """Until it is cancelled."""
    while True:
        if jump_s := service.clock.look():
            logger.warning("The clock was set", extra={"seconds": round(jump_s, 3)})
        await asyncio.sleep(CLOCK_LOOK_S)


def make_server(
    app: Starlette, settings: ServerSettings, tls: TlsFiles | None = None
) -> HttpServer:
    """Uvicorn, set up as we want it: `serve(sockets=[…])` runs it, `leave()` ends it."""
    config = Config(
        app,
        http=http_protocol(settings.limits),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        log_level="error",  # a line for each malformed request would be a gift to its sender
        server_header=False,
        proxy_headers=False,  # a client's word on who it is counts for nothing here
        root_path=settings.root_path,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(LAST_WRITES_S),
    )
    config.load()
    if tls is not None:
        config.ssl = tls.context
    return HttpServer(config)


async def _load(
    engine: ServedEngine, observer: LifecycleObserver, stop: asyncio.Event, service: Service,
    modules: list[AdapterModule],
) -> bool:  # fmt: skip
    """True once the model and its adapters are loaded, false if the process was signalled to stop
    before. Raises ConfigError."""
    ready = asyncio.create_task(engine.ready())
    stopped = asyncio.create_task(_first(stop.wait(), service.admission.drain_requested.wait()))
    try:
        while not ready.done() and not stopped.done():
            observer.loading(engine.health())
            await asyncio.wait(
                (ready, stopped), timeout=PROGRESS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
            )
        if not ready.done():
            return False
        info = ready.result()
        await service.model.adapters.load_modules(modules)
        service.admission.awaits_adapters = False
        observer.ready(info)
        return True
    finally:
        ready.cancel()
        stopped.cancel()
        await asyncio.wait((ready, stopped))


async def _drain(
    engine: ServedEngine, service: Service, timeout_s: float, observer: LifecycleObserver
) -> None:
    """New work is refused from here on; what is in flight may finish. Batches do not: the next
    server goes on with them."""
    service.start_draining()
    if service.batches is not None:
        await service.batches.stop()
    observer.draining(service.admission.in_flight)
    await engine.drain(timeout_s)
    # The engine is done, or has aborted the rest; the last bytes may still be on their way out.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_WRITES_S):
            await service.admission.idle()


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextlib.contextmanager
def _signals(stop: asyncio.Event, reloader: Reloader) -> Generator[None, None, None]:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():  # a second signal: stop at once
            logger.warning("Exiting immediately after a second signal")
            os._exit(1)
        stop.set()

    known = (signal.SIGTERM, signal.SIGINT)
    for number in known:
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, reloader.look_now)
    try:
        yield
    finally:
        for number in (*known, signal.SIGHUP):
            loop.remove_signal_handler(number)


class HttpServer(Server):
    """Uvicorn without its signal handling and its ten wake-ups a second."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the process's own handlers drain first

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # sets the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leaving.wait()
