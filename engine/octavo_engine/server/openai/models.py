"""GET /v1/models, /version and /load: what is served, by which release, and how busy it is."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from octavo_engine import __version__
from octavo_engine.server.admin.dev import read_query
from octavo_engine.server.anthropic.paging import page_of
from octavo_engine.server.anthropic.shapes import AnthropicModel, AnthropicModelList
from octavo_engine.server.http.error_shapes import speaks_anthropic
from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service, optional


class ModelsQuery(msgspec.Struct, kw_only=True):
    """Pages, for Anthropic's clients; others get all models at once."""

    limit: int | None = None
    after_id: str | None = None
    before_id: str | None = None


async def list_models(exchange: Exchange, service: Service) -> None:
    """In Anthropic's shape for clients that send anthropic-version."""
    if speaks_anthropic(exchange.scope):
        page = _page(service, read_query(exchange, ModelsQuery))
        await exchange.reply(msgspec.json.encode(page))
        return
    cards = [_card(service, name) for name in _names(service)]
    await exchange.reply(msgspec.json.encode({"object": "list", "data": cards}))


async def get_model(exchange: Exchange, service: Service) -> None:
    name = service.model.check_name(exchange.scope["path_params"]["model"])
    if speaks_anthropic(exchange.scope):
        await exchange.reply(msgspec.json.encode(_anthropic(service, name)))
        return
    await exchange.reply(msgspec.json.encode(_card(service, name)))


async def version(exchange: Exchange, service: Service) -> None:
    await exchange.reply(msgspec.json.encode({"version": __version__}))


async def load(exchange: Exchange, service: Service) -> None:
    """Requests in flight, in vLLM's shape."""
    await exchange.reply(msgspec.json.encode({"server_load": service.admission.in_flight}))


def _page(service: Service, query: ModelsQuery) -> AnthropicModelList:
    page, has_more = page_of(
        _names(service), str, "model",
        limit=query.limit, after_id=query.after_id, before_id=query.before_id,
    )  # fmt: skip
    return AnthropicModelList(
        data=[_anthropic(service, name) for name in page], has_more=has_more,
        first_id=page[0] if page else None, last_id=page[-1] if page else None,
    )  # fmt: skip


def _anthropic(service: Service, name: str) -> AnthropicModel:
    info = optional(lambda: service.engine.info)
    room = None if info is None else info.max_model_len
    created = datetime.fromtimestamp(service.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(
        id=name, display_name=name, created_at=created, lifecycle="active",
        max_input_tokens=room, max_tokens=room,
    )  # fmt: skip


def _names(service: Service) -> list[str]:
    return [*service.model.names, *service.model.adapters.names]


def _card(service: Service, name: str) -> dict[str, Any]:
    info = optional(lambda: service.engine.info)
    adapter = service.model.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "octavo",
        "root": service.engine.config.model if adapter is None else adapter.path,
        "parent": None if adapter is None else service.model.names[0],
        "max_model_len": None if info is None else info.max_model_len,
        "permission": [_permission(service, name)],
        "vocab_size": None if info is None else info.vocab_size,  # ours; for load generators
        "tasks": None if info is None else info.tasks,  # ours too
        "implementation": None if info is None else info.implementation,  # ours too
    }


def _permission(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's, which clients of old still read: everybody may use the model, nobody tune it."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": service.started_at,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
