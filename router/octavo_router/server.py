"""One router process: its sockets, its signals, and how it ends without losing a request.

SIGTERM   /ready says 503; new requests are still taken for a while; answers close their
          connections; then the port is closed, what is under way may finish until the drain
          deadline, and what is left then gets an error
SIGHUP    the configuration is read again; a bad one is reported and the old one stays
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import TYPE_CHECKING

from octavo_router.errors import ConfigInvalid, Rejected
from octavo_router.flow.handshakes import TlsListener
from octavo_router.gauges import make_connection_gauges
from octavo_router.http.client_connection import ClientConnection
from octavo_router.http.connection_settings import Shared
from octavo_router.http.cors import Cors
from octavo_router.http.loopback import is_loopback, names_this_machine
from octavo_router.http.request_head import HeadRules
from octavo_router.http.sockets import affordable_connections, open_listener
from octavo_router.http.tls import certificate_watch, server_context
from octavo_router.proxy.admin_service import AdminService
from octavo_router.proxy.paths import UPLOADS

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from octavo_router.app import App
    from octavo_router.config.settings import RouterConfig, ServerConfig
    from octavo_router.http.network import Listening

logger = logging.getLogger("octavo.router")

_ANNOUNCED_BYTES = 16 * 2**20  # between looks at memory
_LOOK_S = 0.05  # between looks at what is still under way
_CERTIFICATE_LOOK_S = 10.0


class Server:
    """Listens for an `App`. Use `run`, or `start` and `stop` where the loop is somebody else's."""

    def __init__(
        self,
        app: App,
        *,
        listener: socket.socket | None = None,
        admin_listener: socket.socket | None = None,
    ) -> None:
        self._app = app
        self._listener = listener
        self._admin_listener = admin_listener
        self._admin_server: Listening | TlsListener | None = None
        self._loop = asyncio.get_running_loop()
        self._server: Listening | TlsListener | None = None
        self._tls: ssl.SSLContext | None = None
        self._stopping = asyncio.Event()
        self._is_interrupted = False  # by Ctrl-C at a terminal
        self._tasks: set[asyncio.Task[None]] = set()
        limits = app.config.limits
        self.shared = Shared(
            app.proxy, limits, app.config.timeouts, app.deadlines, self._loop,
            max_connections=affordable_connections(limits.max_connections),
            rules=_rules(app.config.server, app.config.server.host),
        )  # fmt: skip
        self.admin_shared = Shared(
            AdminService(app.admin_routes), limits, app.config.timeouts, app.deadlines, self._loop,
            rules=_rules(app.config.server, app.config.server.admin_host),
        )  # fmt: skip
        app.on_applied = self._reconfigure
        app.on_keys = self._end_revoked
        app.awaited_bytes = self._awaited_bytes
        self.shared.on_body = self._body_begins
        self._num_announced = 0
        app.metrics.add_source(
            make_connection_gauges(
                lambda: len(self.shared.connections), lambda: app.upstreams.num_connections
            )
        )

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def admin_port(self) -> int:
        assert self._admin_server is not None
        port: int = self._admin_server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        config = self._app.config.server
        if config.tls_cert:
            self._tls = server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
            self._tasks.add(self._loop.create_task(self._renew_certificate(config)))
        listener = self._listener or open_listener(config.host, config.port)
        self._server = await self._listen(listener, self.shared)
        if config.admin_port or self._admin_listener:
            admin = self._admin_listener or open_listener(
                config.admin_host, config.admin_port, field="server.admin_port"
            )
            self._admin_server = await self._listen(admin, self.admin_shared)

    async def _listen(self, listener: socket.socket, shared: Shared) -> Listening | TlsListener:
        def make_protocol() -> ClientConnection:
            return ClientConnection(shared)

        if self._tls is None:
            return await self._app.network.listen(make_protocol, listener)
        server = TlsListener(listener, self._tls, make_protocol, shared)
        server.start()
        return server

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Until SIGTERM or SIGINT, and through the drain."""
        await self.start()
        self._loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        self._loop.add_signal_handler(signal.SIGINT, self._interrupted)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        on_ready()
        await self._stopping.wait()
        await self.drain()
        await self.stop()

    async def drain(self) -> None:
        """Ends what it does without ending what is under way."""
        config = self._app.config.server
        app, shared = self._app, self.shared
        app.begin_draining()
        shared.is_closing = True
        logger.info("Draining", extra={"in_flight": len(app.proxy.exchanges)})
        began_at = time.monotonic()
        # Whoever routes to us learns of it only after a while: be there for them until then.
        await self._until(lambda: self._is_interrupted, began_at + config.accept_while_draining_s)
        assert self._server is not None
        self._server.close()
        self._close_idle()
        deadline = began_at + config.drain_timeout_s
        await self._until(lambda: not app.proxy.exchanges, deadline)
        error = Rejected(
            503, "server_shutdown", "The router is shutting down.", retry_after_s=1.0, close=True
        )
        left = list(app.proxy.exchanges)
        if left:
            logger.warning("Ended requests at the drain deadline", extra={"requests": len(left)})
        for exchange in left:
            exchange.shut_down(error)

    async def stop(self) -> None:
        for server in (self._server, self._admin_server):
            if server is not None:
                server.close()
        for task in self._tasks:
            task.cancel()
        self._close_idle()
        await self._until(lambda: not self.shared.connections, time.monotonic() + 1.0)
        for connection in (*self.shared.connections, *self.admin_shared.connections):
            connection.abort()

    def _interrupted(self) -> None:
        """Ctrl-C. The second one does not wait."""
        self._is_interrupted = True
        if self._stopping.is_set():
            for exchange in list(self._app.proxy.exchanges):
                exchange.shut_down(Rejected(503, "server_shutdown", "The router was stopped."))
        self._stopping.set()

    def _reload(self) -> None:
        task = self._loop.create_task(self._reload_now())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_now(self) -> None:
        try:
            changed = await self._app.reload()
        except ConfigInvalid as error:
            logger.error("Kept the old configuration: %s", error)
            return
        logger.info("Read the configuration again", extra={"changed": changed})

    def _reconfigure(self, config: RouterConfig) -> None:
        num_affordable = affordable_connections(config.limits.max_connections)
        for shared in (self.shared, self.admin_shared):
            shared.reconfigure(config.limits, config.timeouts, max_connections=num_affordable)

    async def _renew_certificate(self, config: ServerConfig) -> None:
        watch = certificate_watch((config.tls_cert, config.tls_key, config.tls_client_ca))
        while True:
            await asyncio.sleep(_CERTIFICATE_LOOK_S)
            watch.take(lambda: self.renew_certificate(config))

    def renew_certificate(self, config: ServerConfig) -> None:
        """For connections from now on. Raises ConfigInvalid, and then nothing has changed."""
        context = server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
        for server in (self._server, self._admin_server):
            if isinstance(server, TlsListener):
                server.context = context
        logger.info("Took the new certificate")

    def _end_revoked(self) -> None:
        """Who could not come in with its key any more is not answered to the end either."""
        for connection in list(self.shared.connections):
            owner, head = connection.owner, connection.head
            if owner is None or head is None or not head.facts.needs_key:
                continue
            try:
                self._app.gate.tenants.authenticate(head.credentials)
            except Rejected:
                owner.shut_down(
                    Rejected(401, "invalid_api_key", "The API key was revoked.", close=True)
                )

    def _awaited_bytes(self) -> int:
        return sum(connection.awaited_bytes for connection in self.shared.connections)

    def _body_begins(self, num_bytes: int) -> None:
        """Many large ones at once do not wait for the next look at memory."""
        self._num_announced += num_bytes
        if self._num_announced >= _ANNOUNCED_BYTES:
            self._num_announced = 0
            self._app.look_at_memory()

    def _close_idle(self) -> None:
        for connection in list(self.shared.connections):
            connection.close_when_idle()

    async def _until(self, is_true: Callable[[], bool], deadline: float) -> None:
        while not is_true() and time.monotonic() < deadline:  # noqa: ASYNC110  # at its end only
            await asyncio.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))


def _rules(config: ServerConfig, host: str) -> HeadRules:
    """Of a listener on this host."""
    allowed = frozenset(name.lower() for name in config.allowed_hosts)
    is_here = names_this_machine(host) and (host == "localhost" or is_loopback(host))

    def allows_host(named: str) -> bool:
        name = named.rpartition(":")[0] if named.rpartition(":")[2].isdigit() else named
        # No browser leaves it out, and HTTP/1.0 may.
        return not named or names_this_machine(named) or name.lower() in allowed

    cors = Cors(config) if config.allowed_origins else None
    return HeadRules(
        allows_host=allows_host if (allowed or is_here) and "*" not in allowed else None,
        answer_lines=cors.answer_lines if cors is not None else None,
        uploads=UPLOADS,
    )
