"""GET /v1/models, /version and /load: what is served, by which release, and how busy it is."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo_engine import __version__
from octavo_engine.server.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service, optional


async def list_models(exchange: Exchange, service: Service) -> None:
    cards = [_card(service, name) for name in service.names]
    await exchange.reply(msgspec.json.encode({"object": "list", "data": cards}))


async def get_model(exchange: Exchange, service: Service) -> None:
    name = service.check_model(exchange.scope["path_params"]["model"])
    await exchange.reply(msgspec.json.encode(_card(service, name)))


async def version(exchange: Exchange, service: Service) -> None:
    await exchange.reply(msgspec.json.encode({"version": __version__}))


async def load(exchange: Exchange, service: Service) -> None:
    """Requests in flight, in vLLM's shape."""
    await exchange.reply(msgspec.json.encode({"server_load": service.in_flight}))


def _card(service: Service, name: str) -> dict[str, Any]:
    info = optional(lambda: service.engine.info)
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "octavo",
        "root": service.engine.config.model,
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
        "permission": [_permission(service, name)],
        "vocab_size": None if info is None else info.vocab_size,  # ours; for load generators
        "tasks": None if info is None else info.tasks,  # ours too
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
