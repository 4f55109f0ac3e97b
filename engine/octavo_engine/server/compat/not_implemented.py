"""Routes that exist so that their callers learn why: audio, weights, workers."""

from __future__ import annotations

from typing import NoReturn

import msgspec

from octavo_engine.core.pooling.async_pooling import WrongTask
from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service  # noqa: TC001


class AudioForm(msgspec.Struct, kw_only=True):
    """Of a transcription or translation."""

    file: bytes
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: str | None = None
    temperature: float | None = None
    stream: bool | None = None


class WorkerCall(msgspec.Struct, kw_only=True):
    method: str


async def audio(exchange: Exchange, service: Service) -> None:
    """The file is not read: the server throws away what comes after the answer."""
    media_type = exchange.header(b"content-type").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise HttpError(
            415,
            f"content-type must be multipart/form-data; got {media_type or 'none'}",
            code="unsupported_media_type",
        )
    info = service.engine.info
    raise WrongTask(
        f"the model {info.names[0]} is not a speech model; it supports {', '.join(info.tasks)}",
        param="model",
    )


async def realtime(exchange: Exchange, service: Service) -> None:
    _refuse("speech is not recognised here, so it cannot be streamed either")


async def weight_update(exchange: Exchange, service: Service) -> None:
    _refuse("weights cannot be replaced while the server runs; start another server with them")


async def collective_rpc(exchange: Exchange, service: Service) -> None:
    _refuse("methods of the engine's processes cannot be called from outside")


def _refuse(message: str) -> NoReturn:
    raise HttpError(501, message, code="not_implemented")
