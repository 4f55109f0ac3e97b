"""GET /openapi.json, /docs that shows it, and / with a chat: pages that need no other host."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from octavo_engine.server.http.exchange import Exchange  # noqa: TC001  (a route's signature)
from octavo_engine.server.service import Service  # noqa: TC001


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
    await _reply(exchange, "docs.html")


async def home(exchange: Exchange, service: Service) -> None:
    await _reply(exchange, "home.html")


async def _reply(exchange: Exchange, name: str) -> None:
    text, policy = _page(name)
    await exchange.reply(
        text,
        headers=[
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ],
    )


@cache
def _page(name: str) -> tuple[bytes, bytes]:
    """The page, and a policy that lets nothing run but its own script."""
    text = (Path(__file__).parent / name).read_bytes()
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'"
        for inline in re.findall(rb"<(?:script|style)>(.*?)</(?:script|style)>", text, re.S)
    ]
    allowed = " ".join(hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {allowed}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy.encode()
