"""/v1/batches: files of requests to be answered, when there is time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo_engine.server.admin.dev import read_query
from octavo_engine.server.http.errors import unavailable
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.batches import shapes
from octavo_engine.server.openai.batches.files import cut_page, shelf_of
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.server.openai.batches.shelf import BatchRecord

MAX_LISTED, LISTED = 100, 20


async def create_batch(exchange: Exchange, service: Service) -> None:
    request = await exchange.json(shapes.BatchRequest)
    if service.admission.is_draining:
        raise unavailable("draining", "The server is shutting down.", retry_after_s=1)
    assert service.batches is not None
    batch = service.batches.create(request, owner_of(exchange, service.guard).hex())
    await exchange.reply(msgspec.json.encode(batch))


async def list_batches(exchange: Exchange, service: Service) -> None:
    """The newest first."""
    query = read_query(exchange, shapes.BatchesQuery)
    batches = shelf_of(service).batches_of(owner_of(exchange, service.guard).hex())[::-1]
    page, more = cut_page(batches, query.after, query.limit, most=MAX_LISTED, usual=LISTED)
    answer = shapes.BatchList(
        object="list", data=page, has_more=more,
        first_id=page[0].id if page else None, last_id=page[-1].id if page else None,
    )  # fmt: skip
    await exchange.reply(msgspec.json.encode(answer))


async def get_batch(exchange: Exchange, service: Service) -> None:
    await exchange.reply(msgspec.json.encode(_found(exchange, service).batch))


async def cancel_batch(exchange: Exchange, service: Service) -> None:
    """One that is over stays as it is."""
    record = _found(exchange, service)
    assert service.batches is not None
    service.batches.cancel(record)
    await exchange.reply(msgspec.json.encode(record.batch))


def _found(exchange: Exchange, service: Service) -> BatchRecord:
    id_ = str(exchange.scope["path_params"]["batch_id"])
    return shelf_of(service).batch(id_, owner_of(exchange, service.guard).hex())
