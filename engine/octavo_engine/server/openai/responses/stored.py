"""GET, DELETE and cancel of stored responses, and the list of the input of one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from octavo_engine.errors import InvalidRequest
from octavo_engine.server.admin.dev import read_query
from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.http.owner import owner_of
from octavo_engine.server.openai.responses import shapes
from octavo_engine.server.openai.responses.bodies import InputItemsQuery, ResponseQuery
from octavo_engine.server.openai.responses.create import read_log
from octavo_engine.server.service import Service  # noqa: TC001

if TYPE_CHECKING:
    from octavo_engine.server.openai.responses.store import StoredTurn

MAX_LISTED, LISTED = 100, 20


async def get_response(exchange: Exchange, service: Service) -> None:
    """As it is now, or its events from the one behind `starting_after` on."""
    stored = _found(exchange, service)
    query = read_query(exchange, ResponseQuery)
    seen = query.starting_after
    if seen is not None and (seen < 0 or not query.stream):
        raise InvalidRequest(
            f"starting_after is the sequence_number of an event, for stream=true; got {seen}",
            param="starting_after",
        )
    if query.stream:
        if stored.log is None:
            raise InvalidRequest(
                "stream: only a response that was made with background: true and stream: true "
                "has its events kept; fetch it without stream",
                param="stream",
            )
        async with exchange.while_present():
            await read_log(exchange, stored.log, 0 if seen is None else seen + 1)
        return
    await exchange.reply(msgspec.json.encode(stored.response))


async def delete_response(exchange: Exchange, service: Service) -> None:
    """One that runs is ended."""
    stored = _found(exchange, service)
    id_ = stored.response.id
    await _end(stored)
    service.responses.drop(id_)
    answer = shapes.DeletedResponse(id=id_, object="response", deleted=True)
    await exchange.reply(msgspec.json.encode(answer))


async def cancel_response(exchange: Exchange, service: Service) -> None:
    """One that has ended stays as it is."""
    stored = _found(exchange, service)
    if not stored.response.background:
        raise InvalidRequest(
            "only a response that was made with background: true can be cancelled",
            param="response_id",
        )
    await _end(stored)
    await exchange.reply(msgspec.json.encode(stored.response))


async def list_input_items(exchange: Exchange, service: Service) -> None:
    stored = _found(exchange, service)
    query = read_query(exchange, InputItemsQuery)
    limit = LISTED if query.limit is None else query.limit
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequest(
            f"limit must be between 1 and {MAX_LISTED}; got {limit}", param="limit"
        )
    items = stored.input_items if query.order == "asc" else stored.input_items[::-1]
    if query.after is not None:
        places = [n for n, item in enumerate(items) if item["id"] == query.after]
        if not places:
            raise InvalidRequest(f"after: no item has the id {query.after[:128]}", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    answer = shapes.InputItemList(
        object="list",
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > len(page),
    )
    await exchange.reply(msgspec.json.encode(answer))


def _found(exchange: Exchange, service: Service) -> StoredTurn:
    id_ = str(exchange.scope["path_params"]["response_id"])
    owner = owner_of(exchange, service.guard)
    stored = service.responses.get(id_, owner)
    if stored is None:
        raise HttpError(
            404,
            f"Response with id '{id_[:128]}' not found.",
            param="response_id",
            code="response_not_found",
        )
    return stored


async def _end(stored: StoredTurn) -> None:
    if stored.task is not None and not stored.task.done():
        stored.task.cancel()
        await asyncio.wait([stored.task])
    if stored.is_running:  # it was ended before it had begun
        stored.response.status = "cancelled"
        if stored.log is not None:
            stored.log.close()
