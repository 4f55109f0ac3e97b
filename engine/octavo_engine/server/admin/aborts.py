"""POST /abort_requests: end requests by the ids that their clients or the server gave them."""

from __future__ import annotations

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service  # noqa: TC001

_MAX_IDS = 4096


class AbortRequest(msgspec.Struct, kw_only=True):
    """Ids as in x-request-id, as in the answers, or the engine's own."""

    request_ids: str | list[str]


class Aborted(msgspec.Struct, kw_only=True):
    aborted: int  # requests that were stopped
    not_found: list[str]  # ids of nothing that runs here, any more or at all


async def abort_requests(exchange: Exchange, service: Service) -> None:
    """Generations end with what they have and finish_reason "abort"; others with an error."""
    request = await exchange.json(AbortRequest)
    given = request.request_ids
    ids = [given] if isinstance(given, str) else list(dict.fromkeys(given))
    if len(ids) > _MAX_IDS:
        raise InvalidRequest(
            f"request_ids must be at most {_MAX_IDS}; got {len(ids)}", param="request_ids"
        )
    counts = {id_: await service.running.stop(id_) for id_ in ids}
    missing = [id_ for id_, count in counts.items() if not count]
    answer = Aborted(aborted=sum(counts.values()), not_found=missing)
    await exchange.reply(msgspec.json.encode(answer))
