"""The gRPC server of the endpoint picker: its port, its certificate, its streams.

Messages go in and out as bytes: the few that there are have their own reader (messages), so that
nothing must be generated, and nothing is parsed that is only passed on.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from octavo_router.epp.health import PickerHealth
from octavo_router.epp.picker import Picker
from octavo_router.epp.stream import PickerStream
from octavo_router.epp.wire import ProtobufError
from octavo_router.errors import ConfigInvalid
from octavo_router.http.tls import certificate_watch, server_context

if TYPE_CHECKING:
    from typing import Self

    from octavo_router.config.settings import EppConfig
    from octavo_router.epp.picker import PickerParts

logger = logging.getLogger("octavo.router")

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS: Final = f"/{SERVICE}/Process"

_MESSAGE_ROOM: Final = 256 * 2**10  # of a message that holds a body, for all else
_KEEPALIVE_MS: Final = 20_000
_MAX_STREAMS: Final = 10_000  # of one connection; gateways have few connections


class EppServer:
    """Use as `async with EppServer(parts)`. Ends gracefully: streams may finish first."""

    def __init__(self, parts: PickerParts) -> None:
        config = parts.settings()
        self._config = config
        self._picker = Picker(parts)
        self._health = PickerHealth(parts.is_ready, SERVICE)
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(self._config.server.drain_timeout_s)

    async def start(self) -> None:
        """Raises ConfigInvalid: the port is taken, or the certificate cannot be read."""
        epp, server = self._config.epp, self._config.server
        max_bytes = self._config.limits.max_body_bytes + _MESSAGE_ROOM
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", max_bytes),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                # A gateway that vanished must not hold its requests' places; one that pings
                # often is no attacker.
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS // 2),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                # Several processes share the port; one alone must notice that it is taken.
                ("grpc.so_reuseport", int(server.workers > 1)),
            ]
        )
        handlers = {PROCESS: grpc.stream_stream_rpc_method_handler(self._process)}
        self._server.add_generic_rpc_handlers((_Handlers(handlers | self._health.handlers()),))
        where = f"[{server.host}]:{epp.port}" if ":" in server.host else f"{server.host}:{epp.port}"
        try:
            if epp.tls_cert:
                self.port = self._server.add_secure_port(where, _credentials(epp))
            else:
                self.port = self._server.add_insecure_port(where)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise ConfigInvalid("epp.port", f"cannot listen on {where}; choose another")
        await self._server.start()
        logger.info("Picks endpoints", extra={"port": self.port, "tls": bool(epp.tls_cert)})

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more streams; those that there are have so long."""
        self._health.is_over = True
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

    async def _process(
        self, requests: object, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        del requests  # read one at a time instead, so that it can be seen when no more will come

        async def read() -> bytes | None:
            data = await context.read()
            return None if data is grpc.aio.EOF else data

        try:
            await PickerStream(self._picker, read, context.write).run()
        except ProtobufError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # published without types
    """Finds a method's handler by its full name."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


def _credentials(epp: EppConfig) -> Any:
    """A certificate that is read again when its files change."""
    watch = certificate_watch((epp.tls_cert, epp.tls_key, epp.tls_client_ca))
    first = _certificate(epp)

    def fetch() -> Any:  # called for each connection, on a thread of gRPC's
        found: list[Any] = []
        watch.take(lambda: found.append(_certificate(epp)))
        return found[0] if found else None

    return grpc.dynamic_ssl_server_credentials(
        first, fetch, require_client_authentication=bool(epp.tls_client_ca)
    )


def _certificate(epp: EppConfig) -> Any:
    key, cert = _pem(epp.tls_key, "epp.tls_key"), _pem(epp.tls_cert, "epp.tls_cert")
    authority = _pem(epp.tls_client_ca, "epp.tls_client_ca") if epp.tls_client_ca else None
    server_context(epp.tls_cert, epp.tls_key, epp.tls_client_ca)  # whether they fit together
    return grpc.ssl_server_certificate_configuration([(key, cert)], authority)


def _pem(path: str, field: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigInvalid(field, f"cannot read {path}: {error.strerror}") from None
    if b"-----BEGIN" not in data:
        raise ConfigInvalid(field, f"{path} is no PEM file")
    return data
