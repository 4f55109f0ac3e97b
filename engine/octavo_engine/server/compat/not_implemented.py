"""Routes that exist so that their callers learn why: live speech, weights, workers."""

from __future__ import annotations

from typing import NoReturn

import msgspec

from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service  # noqa: TC001


class WorkerCall(msgspec.Struct, kw_only=True):
    method: str


async def realtime(exchange: Exchange, service: Service) -> None:
    _refuse("speech is not recognised here, so it cannot be streamed either")


async def weight_update(exchange: Exchange, service: Service) -> None:
    _refuse("weights cannot be replaced while the server runs; start another server with them")


async def collective_rpc(exchange: Exchange, service: Service) -> None:
    _refuse("methods of the engine's processes cannot be called from outside")


def _refuse(message: str) -> NoReturn:
    raise HttpError(501, message, code="not_implemented")
