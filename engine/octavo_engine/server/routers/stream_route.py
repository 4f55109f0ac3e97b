"""GET /octavo/v1/stream: subscribes a router to this engine's load and residency."""

from __future__ import annotations

import asyncio

from octavo_engine.protocol.stream import CONTENT_TYPE
from octavo_engine.server.admin import probes
from octavo_engine.server.http.disconnect import ClientGone
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service  # noqa: TC001

_HEADERS = [
    (b"content-type", CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def stream(exchange: Exchange, service: Service) -> None:
    """Ends when the cache is lost or the server leaves. 503 while there is no core; of one that
    loads it reports the progress, as /ready does."""
    if service.engine.health().state == "loading":
        await probes.ready(exchange, service)
        return
    hub = service.hub
    subscriber = hub.subscribe()
    try:
        async with exchange.while_present():
            await exchange.open_stream(_HEADERS)
            while payload := await subscriber.read():
                await exchange.write(payload)
        await exchange.close()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if subscriber.is_cut and task is not None and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        hub.leave(subscriber)
