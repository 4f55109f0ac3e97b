"""POST /octavo/v1/drain: stop taking work, finish what is in flight, exit."""

from __future__ import annotations

import msgspec

from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service  # noqa: TC001


async def drain(exchange: Exchange, service: Service) -> None:
    """Answers at once; a second call does no more. The process exits when nothing is in flight."""
    service.start_draining()
    service.admission.drain_requested.set()
    body = {"state": "draining", "in_flight": service.admission.in_flight}
    await exchange.reply(msgspec.json.encode(body), status=202)
