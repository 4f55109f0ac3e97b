"""gRPC's health protocol: `liveness`: the loop turns, `readiness`: endpoints are known.

The service without a name and the picker's own answer as `readiness` does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import grpc

from octavo_router.epp.wire import BLOB, ProtobufError, fields, number_field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SERVICE: Final = "grpc.health.v1.Health"
LIVENESS: Final = "liveness"
READINESS: Final = "readiness"

SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3  # only for those who watch

_LOOK_S: Final = 0.5  # between looks on behalf of those who watch


class PickerHealth:
    """Answers Check and Watch."""

    def __init__(self, is_ready: Callable[[], bool], picker_service: str) -> None:
        self._is_ready = is_ready
        self.is_over = False  # the watch ends
        self._like_readiness = ("", READINESS, picker_service)

    def status(self, service: str) -> int:
        if service == LIVENESS:
            return SERVING
        if service in self._like_readiness:
            return SERVING if self._is_ready() else NOT_SERVING
        return SERVICE_UNKNOWN

    async def check(self, data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        service = await _service(data, context)
        status = self.status(service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {service!r}")
        return number_field(1, status)

    async def watch(
        self, data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        service = await _service(data, context)
        sent = 0
        while not self.is_over:
            status = self.status(service)
            if status != sent:
                sent = status
                yield number_field(1, status)
            await asyncio.sleep(_LOOK_S)

    def handlers(self) -> dict[str, Any]:
        """By full method name, for bytes in and bytes out."""
        return {
            f"/{SERVICE}/Check": grpc.unary_unary_rpc_method_handler(self.check),
            f"/{SERVICE}/Watch": grpc.unary_stream_rpc_method_handler(self.watch),
        }


async def _service(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> str:
    service = b""
    try:
        for number, wire_type, _, content in fields(data):
            if number == 1 and wire_type == BLOB:
                service = content
    except ProtobufError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    return service.decode("utf-8", "replace")
