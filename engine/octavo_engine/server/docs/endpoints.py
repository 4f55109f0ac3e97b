"""GET /openapi.json, /docs that shows it, and / with a chat: pages that need no other host."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo_common.pages import API_DOCS, CHAT_FILES, read_page
from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.http.exchange import Exchange, Header  # noqa: TC001  (signatures)
from octavo_engine.server.service import Service  # noqa: TC001

_HOME: Final = Path(__file__).with_name("home.html")


class OpenApi(msgspec.Struct, kw_only=True):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    servers: list[dict[str, Any]]
    paths: dict[str, Any]
    components: dict[str, Any]


async def openapi(exchange: Exchange, service: Service) -> None:
    await exchange.reply(service.describe())


async def page(exchange: Exchange, service: Service) -> None:
    await _reply(exchange, API_DOCS)


async def home(exchange: Exchange, service: Service) -> None:
    await _reply(exchange, _HOME)


async def chat_file(exchange: Exchange, service: Service) -> None:
    found = CHAT_FILES.get(exchange.scope["path_params"]["name"])
    if found is None:
        raise HttpError(404, "the path does not exist", code="route_not_found")
    path, kind = found
    headers = [(b"content-type", kind.encode()), (b"x-content-type-options", b"nosniff")]
    await exchange.reply(path.read_bytes(), headers=headers)


async def _reply(exchange: Exchange, path: Path) -> None:
    content, headers = _page(path)
    await exchange.reply(content, headers=list(headers))


@cache
def _page(path: Path) -> tuple[bytes, tuple[Header, ...]]:
    content, headers = read_page(path)
    encoded = tuple((name.encode(), value.encode()) for name, value in headers)
    return content, ((b"content-type", b"text/html; charset=utf-8"), *encoded)
