"""Runs a router from its configuration: one process, or several behind one port."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_common.logs import set_up_logging
from octavo_router.config.load import load_config
from octavo_router.config.settings import KeyConfig
from octavo_router.errors import ConfigInvalid
from octavo_router.http.sockets import open_listener

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_router.config.settings import RouterConfig

logger = logging.getLogger("octavo.router")


class ConfigLoader:
    """Reads file, environment and flags, as often as called. Raises ConfigInvalid."""

    def __init__(
        self,
        file: str,
        flags: Mapping[str, Any],
        api_keys: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._file = file
        self._flags = flags
        self._api_keys = api_keys
        self._environment = environment

    def __call__(self) -> RouterConfig:
        text = ""
        if self._file:
            try:
                text = Path(self._file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "is not UTF-8"
                raise ConfigInvalid("--config", f"{self._file}: {reason}") from None
        try:
            config = load_config(text=text, flags=self._flags, environment=self._environment)
        except ConfigInvalid as error:
            raise ConfigInvalid.of([self._named(fault) for fault in error.faults]) from None
        if not self._api_keys:
            return config
        keys = tuple(
            KeyConfig(tenant=f"key-{number}", key=key)
            for number, key in enumerate(self._api_keys, start=1)
        )
        return replace(config, flow=replace(config.flow, keys=config.flow.keys + keys))

    def _named(self, fault: ConfigInvalid) -> ConfigInvalid:
        """Of a fault of the whole file: the file's name."""
        if fault.field != "file":
            return fault
        return ConfigInvalid("--config", f"{self._file}: {fault.problem}")


def run(load: ConfigLoader, *, on_ready: Callable[[str], None] = lambda url: None) -> int:
    """Until SIGTERM. `on_ready` gets the URL. Raises ConfigInvalid."""
    config = load()
    _check_sources(config)
    set_up_logging(config.server.log_format, config.server.log_level)
    _warn_of_open_door(config)
    server = config.server
    if server.workers == 1:
        listener = open_listener(server.host, server.port)
        return _run_process(config, load, [listener], lambda: on_ready(_url(config, listener)))
    with ExitStack() as stack:
        from octavo_router.workers import WorkerSupervisor

        ports = [(server.host, server.port, "server.port")]
        if server.admin_port:
            ports.append((server.admin_host, server.admin_port, "server.admin_port"))
        reserved = [stack.enter_context(_reserve(*port)) for port in ports]
        on_ready(_url(config, reserved[0]))
        known = LastGood(load, config)

        def run_worker(number: int, is_ready: Callable[[], None]) -> int:
            listeners = []
            for sock in reserved:
                host, port = sock.getsockname()[:2]
                sock.close()
                listeners.append(open_listener(host, port, is_shared=True))
            return known.use(lambda config: _run_process(config, load, listeners, is_ready))

        return WorkerSupervisor(server.workers, run_worker, on_reload=known.reload).run()


class LastGood:
    """What a worker that is started now goes by: the file as it is, else what was good before.

    The parent of the workers holds it. It reads along with them, so that a worker that takes the
    place of a dead one does not go back to how all began.
    """

    def __init__(self, load: Callable[[], RouterConfig], first: RouterConfig) -> None:
        self._load = load
        self._known = [first]  # the newest first

    def reload(self) -> None:
        """Records what the workers are sent to read."""
        try:
            config = self._load()
        except ConfigInvalid:
            return  # each of the workers says so
        self._known = [config, self._known[-1]]

    def use(self, work: Callable[[RouterConfig], int]) -> int:
        """`work` with the best configuration that it takes. Raises ConfigInvalid: it takes none."""
        candidates = list(self._known)
        try:
            candidates.insert(0, self._load())
        except ConfigInvalid as error:
            logger.error("Started with the last good configuration: %s", error)
        *others, oldest = candidates
        for config in others:
            try:
                return work(config)
            except ConfigInvalid as error:  # keys or certificates that cannot be read now
                logger.error("Started with the configuration before: %s", error)
        return work(oldest)


def _run_process(
    config: RouterConfig,
    load: ConfigLoader,
    listeners: Sequence[socket.socket],
    on_ready: Callable[[], None],
) -> int:
    """`listeners`: the clients', and the administrators' where workers share that."""
    from octavo_router.app import App
    from octavo_router.server import Server

    async def work() -> None:
        async with App(config, load=load) as app:
            _spare_collector()
            listener, *more = listeners
            server = Server(app, listener=listener, admin_listener=more[0] if more else None)
            await server.run(on_ready)

    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(work())
    return 0


def _spare_collector() -> None:
    """What is there now stays, and what a request makes has no cycles: little to collect."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not built for every platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _reserve(host: str, port: int, field: str) -> socket.socket:
    """Finds out whether the port can be had, and which one 0 is. It does not listen itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigInvalid(
            field, f"cannot listen on {host}:{port}: {error.strerror}; choose another"
        ) from None
    return sock


def _warn_of_open_door(config: RouterConfig) -> None:
    has_key = config.flow.keys or config.flow.keys_file or config.server.tls_client_ca
    if config.discovery.engine_key and not has_key:
        logger.warning(
            "Engines ask for a key, this router does not: anyone who reaches it is let in. "
            "Give it --api-key or --keys-file"
        )


def _check_sources(config: RouterConfig) -> None:
    discovery = config.discovery
    if not (discovery.upstreams or discovery.file or discovery.kubernetes.enabled):
        raise ConfigInvalid(
            "discovery", "no engines: give --upstreams URL,URL or --config FILE or --kubernetes"
        )


def _url(config: RouterConfig, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.server.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
